// Where every issued group went: bands from "issued" to each state, and a table of the groups.

import { html } from "htm/preact";
import { useState } from "preact/hooks";
import { useDocument } from "./main.js";
import { link } from "./route.js";
import { Problems, number } from "./widgets.js";

const STATES = {
  trained: ["--good", "in a batch that was trained"],
  training: ["--c1", "in the batch that the learner has now"],
  ready: ["--c3", "finished, waiting for a batch"],
  in_flight: ["--c2", "being played"],
  dropped_zero_variance: ["--c4", "finished with equal rewards: no gradient"],
  dropped_stale: ["--bad", "finished too late: its lag was over the bound"],
  failed: ["--bad", "a part of the system failed; never scored"],
  cancelled: ["--soft", "the run ended while it was played"],
  restarted: ["--c5", "a step began without it; its task is played again"],
};
const WIDTH = 900;
const HEIGHT = 260;
const GAP = 6;
const MAX_ROWS = 200;

export function Ledger({ run }) {
  const { value: ledger, error } = useDocument(`${run}/ledger`);
  const [state, setState] = useState("");
  if (error) return html`<${Problems} items=${[error.message]} />`;
  if (!ledger) return html`<p class="soft">Loading …</p>`;
  const counts = new Map();
  for (const name of ledger.columns.state ?? []) counts.set(name, (counts.get(name) ?? 0) + 1);
  const flows = Object.keys(STATES).filter((name) => counts.has(name)).map((name) => ({ name, count: counts.get(name) }));
  if (!ledger.count) return html`<h1>Ledger</h1><p class="panel">No group was issued, or the journal cannot be read.</p>`;
  return html`<h1>Where every group went</h1>
    <p class="soft">${number(ledger.count)} groups were issued. Each is in exactly one state: none is lost, none is counted twice. Click a band to see its groups.</p>
    <${Sankey} total=${ledger.count} flows=${flows} state=${state} setState=${setState} />
    <${Rows} run=${run} columns=${ledger.columns} count=${ledger.count} state=${state} />`;
}

function Sankey({ total, flows, state, setState }) {
  const room = HEIGHT - GAP * (flows.length - 1);
  const least = 3;
  let from = 0;
  let to = 0;
  return html`<div class="panel scroll"><svg class="sankey" viewBox=${`0 0 ${WIDTH} ${HEIGHT + 20}`} role="group" aria-label="Groups by state">
    <rect x="110" y="10" width="10" height=${room} rx="2" fill="var(--ink)" />
    <text x="100" y=${10 + room / 2} text-anchor="end" dominant-baseline="middle" fill="var(--ink)">issued ${number(total)}</text>
    ${flows.map(({ name, count }) => {
      const size = (room * count) / total;
      const tall = Math.max(least, size);
      const [y0, y1] = [10 + from, 10 + to];
      from += size;
      to += tall + GAP;
      const shape = `M120,${y0} C350,${y0} 350,${y1} 580,${y1} L580,${y1 + tall} C350,${y1 + tall} 350,${y0 + size} 120,${y0 + size} Z`;
      const choose = () => setState(state === name ? "" : name);
      return html`<g key=${name} class=${`band ${state && state !== name ? "off" : ""}`} role="button" tabindex="0" aria-pressed=${state === name} aria-label=${`${name}: ${count} groups`} onClick=${choose} onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose())}>
        <title>${STATES[name][1]}</title>
        <path d=${shape} fill=${`var(${STATES[name][0]})`} opacity="0.45" />
        <rect x="580" y=${y1} width="10" height=${tall} rx="2" fill=${`var(${STATES[name][0]})`} />
        <text x="600" y=${y1 + tall / 2} dominant-baseline="middle" fill="var(--ink)">${name.replaceAll("_", " ")} <tspan fill="var(--soft)">${number(count)} · ${number((100 * count) / total)} %</tspan></text>
      </g>`;
    })}
  </svg></div>`;
}

function Rows({ run, columns, count, state }) {
  const rows = Array.from({ length: count }, (_, row) => row).filter((row) => !state || columns.state[row] === state);
  const waited = (row) => (columns.step[row] === null ? null : columns.step[row] - 1 - columns.admitted[row]);
  return html`<div class="bar"><h2>${state ? state.replaceAll("_", " ") : "Groups"}</h2><span class="soft">${number(rows.length)}${rows.length > MAX_ROWS ? `, the last ${MAX_ROWS} are shown` : ""}</span></div>
    <div class="scroll"><table>
      <thead><tr><th scope="col">group</th><th scope="col">task</th><th scope="col">state</th><th scope="col">admitted at version</th><th scope="col">in the batch of step</th><th scope="col" title="steps between admission and training">lag at most</th><th scope="col">rewards</th><th scope="col">reason</th></tr></thead>
      <tbody>
        ${rows.slice(-MAX_ROWS).reverse().map(
          (row) => html`<tr>
            <td>${columns.state[row] === "trained" ? html`<a href=${link(run, "group", ["train", columns.step[row], columns.group_id[row]])}>${columns.group_id[row]}</a>` : columns.group_id[row]}</td>
            <td>${columns.task_id[row]}</td><td>${columns.state[row].replaceAll("_", " ")}</td><td class="num">${columns.admitted[row]}</td><td class="num">${number(columns.step[row])}</td><td class="num">${number(waited(row))}</td>
            <td>${columns.rewards[row]?.map(number).join(" ") ?? "–"}</td><td class="clip" title=${columns.reason[row]}>${columns.reason[row] ?? ""}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>`;
}
