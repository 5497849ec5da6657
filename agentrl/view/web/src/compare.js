// Several runs beside each other: what differs in their configs, their curves, and the held-out tasks of two of them.

import { html } from "htm/preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart } from "./chart.js";
import { format } from "./query.js";
import { load, onChange } from "./store.js";
import { link } from "./route.js";
import { number } from "./widgets.js";

const CURVES = [
  ["Reward", "rollout/reward_mean"],
  ["ESS ratio", "learner/ess_ratio"],
  ["Entropy", "learner/entropy"],
  ["Gradient norm", "learner/grad_norm"],
  ["Lag", "learner/lag_mean"],
];
const QUIET_KEYS = new Set(["name", "out_dir"]);
const NO_MARKS = [];

export function Compare({ runs }) {
  const keys = runs.map((run) => run.key).join("/");
  const summaries = useAll(runs, "summary");
  const [smoothing, setSmoothing] = useState(0);
  const charts = useMemo(() => allCharts(runs, summaries), [summaries, keys]);
  const names = runs.filter((run) => summaries[run.key]);
  if (!names.length) return html`<p class="soft">Loading …</p>`;
  return html`<div class="bar"><h2>Curves</h2>
      <label>smooth <input type="range" min="0" max="0.97" step="0.01" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} /></label></div>
    <div class="charts">${charts.map((one) => html`<${Chart} key=${one.title} ...${one} smoothing=${one.isHeldOut ? 0 : smoothing} marks=${NO_MARKS} />`)}</div>
    <${Paired} runs=${runs} />
    <${Differences} runs=${names} configs=${names.map((run) => flatten(summaries[run.key].config))} />`;
}

/** A document of each run, by key, as they arrive and whenever they change. */
function useAll(runs, name) {
  const [found, setFound] = useState({});
  const keys = runs.map((run) => run.key).join("/");
  useEffect(() => {
    let current = true;
    const get = (key) => load(`${key}/${name}`).then((value) => current && setFound((now) => ({ ...now, [key]: value })), () => {});
    runs.forEach((run) => get(run.key));
    const stop = onChange(get);
    return () => {
      current = false;
      stop();
    };
  }, [keys, name]);
  return found;
}

function allCharts(runs, summaries) {
  const sets = [...new Set(runs.flatMap((run) => summaries[run.key]?.held_out.map((one) => one.name) ?? []))];
  const heldOut = sets.map((name) => ({ ...overlaid(runs, (run) => summaries[run.key]?.held_out.find((one) => one.name === name)?.columns ?? {}, `Held out${name && `, ${name}`}`, "eval/avg_at_n"), isHeldOut: true }));
  return [...heldOut, ...CURVES.map(([title, name]) => overlaid(runs, (run) => summaries[run.key]?.steps.columns ?? {}, title, name))].filter((one) => one.series);
}

function overlaid(runs, columns, title, name) {
  const found = runs.filter((run) => columns(run)[name]);
  if (!found.length) return {};
  const x = [...new Set(found.flatMap((run) => columns(run).step))].sort((a, b) => a - b);
  const series = found.map((run) => {
    const at = new Map(columns(run).step.map((step, row) => [step, columns(run)[name][row]]));
    return { label: run.key, values: x.map((step) => at.get(step) ?? null) };
  });
  return { title, x, series };
}

function Paired({ runs }) {
  const [a, setA] = useState(0);
  const [b, setB] = useState(1);
  const documents = useAll([runs[a], runs[b]], "episodes");
  const pair = useMemo(() => paired(documents[runs[a].key], documents[runs[b].key]), [documents, a, b]);
  const choice = (value, set, label) => html`<label>${label} <select onChange=${(event) => set(Number(event.target.value))}>${runs.map((run, place) => html`<option value=${place} selected=${place === value}>${run.key}</option>`)}</select></label>`;
  return html`<div class="bar"><h2>Held-out tasks</h2>${choice(a, setA, "from")}${choice(b, setB, "to")}</div>
    ${
      !pair
        ? html`<p class="panel">These two runs have no held-out task in common.</p>`
        : html`<p>
            Over ${pair.tasks.length} tasks that both were measured on at their ends, the mean reward changed by <b>${signed(pair.mean)}</b>, 95 % interval [${signed(pair.low)}, ${signed(pair.high)}] over tasks${pair.low > 0 || pair.high < 0 ? ". " : ": it may be chance. "}${pair.count.better} better, ${pair.count.worse} worse, ${pair.count.same} the same.
          </p>
          <div class="scroll"><table>
            <thead><tr><th scope="col">task</th><th scope="col">${runs[a].key}</th><th scope="col">${runs[b].key}</th><th scope="col">change</th></tr></thead>
            <tbody>${pair.tasks.slice(0, 50).map((one) => html`<tr>
              <td><a href=${link(runs[b].key, "episodes", [], { q: filterOf(one) })}>${one.task}</a></td><td class="num">${number(one.before)}</td><td class="num">${number(one.after)}</td><td class=${one.change > 0 ? "good" : one.change < 0 ? "bad" : "soft"}>${signed(one.change)}</td>
            </tr>`)}</tbody>
          </table></div>
          ${pair.tasks.length > 50 && html`<p class="soft">The 50 largest changes.</p>`}`
    }`;
}

/** Mean rewards of each task at the last held-out measurement of two runs; the interval is mean ± t s / sqrt(n). */
export function paired(first, second) {
  const [before, after] = [first, second].map((document) => document && atTheEnd(document));
  if (!before || !after) return null;
  const tasks = [...before.keys()].filter((task) => after.has(task)).map((task) => ({ ...after.get(task), task, before: before.get(task).mean, after: after.get(task).mean, change: after.get(task).mean - before.get(task).mean }));
  if (tasks.length < 2) return null;
  const n = tasks.length;
  const mean = tasks.reduce((sum, one) => sum + one.change, 0) / n;
  const deviation = Math.sqrt(tasks.reduce((sum, one) => sum + (one.change - mean) ** 2, 0) / (n - 1));
  const half = (quantile(n - 1) * deviation) / Math.sqrt(n);
  const count = { better: 0, worse: 0, same: 0 };
  for (const { change } of tasks) count[change > 0 ? "better" : change < 0 ? "worse" : "same"]++;
  tasks.sort((x, y) => Math.abs(y.change) - Math.abs(x.change) || (x.task < y.task ? -1 : 1));
  return { tasks, mean, low: mean - half, high: mean + half, count };
}

function atTheEnd({ columns, count }) {
  const rows = Array.from({ length: count }, (_, row) => row).filter((row) => columns.kind[row] === "eval");
  const last = Math.max(...rows.map((row) => columns.step[row]));
  const sums = new Map();
  for (const row of rows.filter((one) => columns.step[one] === last)) {
    const set = columns.eval_set?.[row];
    const id = columns.task_id[row];
    const task = `${set ? `${set}: ` : ""}${id}`;
    const found = sums.get(task) ?? { set, id, sum: 0, n: 0 };
    sums.set(task, { ...found, sum: found.sum + columns.reward[row], n: found.n + 1 });
  }
  return new Map([...sums].map(([task, { set, id, sum, n }]) => [task, { set, id, mean: sum / n }]));
}

/** The 0.975 quantile of Student's t, by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5). */
export function quantile(degrees) {
  const exact = [12.706, 4.303, 3.182, 2.776];
  if (degrees <= exact.length) return exact[degrees - 1];
  const z = 1.959964;
  return z + (z ** 3 + z) / (4 * degrees) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * degrees ** 2);
}

function Differences({ runs, configs }) {
  const names = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
  const different = names.filter((name) => !QUIET_KEYS.has(name) && new Set(configs.map((config) => config[name])).size > 1);
  return html`<h2>Settings that differ</h2>
    ${
      different.length === 0
        ? html`<p class="panel">None: the runs have the same config.</p>`
        : html`<div class="scroll"><table class="differences">
            <thead><tr><th scope="col">key</th>${runs.map((run) => html`<th scope="col">${run.key}</th>`)}</tr></thead>
            <tbody>${different.map((name) => html`<tr><td class="mono">${name}</td>${configs.map((config) => html`<td class="mono">${config[name] ?? "–"}</td>`)}</tr>`)}</tbody>
          </table></div>`
    }`;
}

function flatten(value, name = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, inner] of Object.entries(value)) flatten(inner, name ? `${name}.${key}` : key, found);
  } else found[name] = JSON.stringify(value);
  return found;
}

function filterOf({ set, id }) {
  return format([{ column: "kind", sign: "=", value: "eval" }, ...(set ? [{ column: "eval_set", sign: "=", value: set }] : []), { column: "task_id", sign: "=", value: id }]);
}

function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}
