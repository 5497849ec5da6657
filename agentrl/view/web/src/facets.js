// What the episodes are like, to click: counts of words, histograms of numbers. A click adds a condition to the filter.

import { html } from "htm/preact";
import { useMemo } from "preact/hooks";
import { parse, select, withConditions } from "./query.js";
import { number } from "./widgets.js";

const WORDS = ["kind", "eval_set", "stop_reason", "correct"];
const NUMBERS = ["reward", "step", "turns", "tokens", "lag", "weight", "tool_errors", "wall_s"];
const BARS = 16;

export function Facets({ document, line, set }) {
  const { columns, count } = document;
  const rewards = Object.keys(columns).filter((name) => name.startsWith("rewards/"));
  const numbers = [...NUMBERS.slice(0, 1), ...(rewards.length > 1 ? rewards : []), ...NUMBERS.slice(1)];
  return html`<aside class="facets" aria-label="Facets">
    ${WORDS.map((name) => html`<${Words} key=${name} ...${{ columns, count, line, set, name }} />`)}
    ${numbers.filter((name) => columns[name]).map((name) => html`<${Histogram} key=${name} ...${{ columns, count, line, set, name }} />`)}
  </aside>`;
}

/** The rows that pass every condition but those on this column, so that a facet shows what else could be chosen. */
function useOthers(columns, count, line, name) {
  const rest = withConditions(line, name, []);
  return useMemo(() => select(columns, count, rest), [columns, rest]);
}

function Words({ columns, count, line, set, name }) {
  const rows = useOthers(columns, count, line, name);
  const counts = new Map();
  for (const row of rows) counts.set(columns[name][row], (counts.get(columns[name][row]) ?? 0) + 1);
  if (counts.size < 2 && !line.includes(`${name}=`)) return null;
  const now = parse(line).find((one) => one.column === name && one.sign === "=")?.value;
  const most = Math.max(...counts.values());
  return html`<fieldset>
    <legend>${name.replace("_", " ")}</legend>
    ${[...counts].filter(([value]) => value !== "").sort((a, b) => b[1] - a[1]).slice(0, 12).map(
      ([value, found]) => html`<button class="word" aria-pressed=${now === String(value)} onClick=${() => set(withConditions(line, name, now === String(value) ? [] : [{ sign: "=", value: String(value) }]))}>
        <i style=${{ width: `${(100 * found) / most}%` }}></i><span>${String(value)}</span><small>${found.toLocaleString("en")}</small>
      </button>`,
    )}
  </fieldset>`;
}

function Histogram({ columns, count, line, set, name }) {
  const rows = useOthers(columns, count, line, name);
  const bins = useMemo(() => binned(columns[name], rows), [columns, rows]);
  if (!bins) return null;
  const most = Math.max(...bins.map((bin) => bin.count));
  const on = parse(line).filter((one) => one.column === name);
  const inside = ({ low, high }) => on.every((one) => (one.sign === ">=" ? low >= Number(one.value) - 1e-12 : one.sign === "<" ? high <= Number(one.value) + 1e-12 : one.sign === "=" ? low === Number(one.value) : true));
  const choose = (bin) => {
    const value = (found) => String(Number(found.toPrecision(6)));
    const conditions = bin.low === bin.high ? [{ sign: "=", value: value(bin.low) }] : [{ sign: ">=", value: value(bin.low) }, { sign: "<", value: value(bin.high) }];
    const isOn = conditions.every((one) => on.some((other) => other.sign === one.sign && other.value === one.value));
    set(withConditions(line, name, isOn ? [] : conditions));
  };
  return html`<fieldset>
    <legend>${name.replace("_", " ")}</legend>
    <div class="histogram">
      ${bins.map((bin) => {
        const label = `${bin.low === bin.high ? number(bin.low) : `${number(bin.low)} to ${number(bin.high)}`}: ${bin.count} episodes`;
        return html`<button title=${label} aria-label=${`${name} ${label}`} aria-pressed=${on.length > 0 && inside(bin)} class=${on.length && !inside(bin) ? "off" : ""} onClick=${() => choose(bin)}>
          <i style=${{ height: `${bin.count ? Math.max(4, (100 * bin.count) / most) : 0}%` }}></i>
        </button>`;
      })}
    </div>
    <div class="ends"><span>${number(bins[0].low)}</span><span>${number(bins.at(-1).high)}</span></div>
  </fieldset>`;
}

/** Bars of one value each where there are few values; else of equal width. None where all rows have the same value. */
function binned(values, rows) {
  const found = rows.map((row) => values[row]).filter((value) => typeof value === "number");
  const distinct = [...new Set(found)].sort((a, b) => a - b);
  if (distinct.length < 2) return null;
  if (distinct.length <= BARS) {
    const counts = new Map(distinct.map((value) => [value, 0]));
    for (const value of found) counts.set(value, counts.get(value) + 1);
    return distinct.map((value) => ({ low: value, high: value, count: counts.get(value) }));
  }
  const low = distinct[0];
  const width = (distinct.at(-1) - low) / BARS;
  const bins = Array.from({ length: BARS }, (_, place) => ({ low: low + place * width, high: low + (place + 1) * width, count: 0 }));
  for (const value of found) bins[Math.min(BARS - 1, Math.floor((value - low) / width))].count++;
  bins.at(-1).high += width * 1e-3; // so that "< high" has the largest value
  return bins;
}
