// All episodes: a filter line in the language of `agentrl view --json`, facets to click, a table that draws what is seen.

import { html } from "htm/preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useDocument } from "./main.js";
import { order, select, withConditions } from "./query.js";
import { kindOf, link, replace } from "./route.js";
import { Facets } from "./facets.js";
import { Problems, Reward, isTyping, number, useKeys } from "./widgets.js";

const ROW = 30;
const DEFAULT = ["step", "task_id", "reward", "above_mean", "stop_reason", "turns", "tokens", "lag", "tool_errors", "prompt", "final"];
const WIDE = { prompt: 320, final: 320, answer: 120, task_id: 150, episode_id: 120, stop_reason: 120 };
const TITLES = { task_id: "task", stop_reason: "ended", tool_errors: "tool errors", tool_calls: "tool calls", final: "last text", above_mean: "above mean", wall_s: "seconds", group_id: "group", episode_id: "episode", oldest_version: "from version" };

/** The episodes that the address asks for, in its order; the same list for the table and for j and k in an episode. */
export function chosen(document, query) {
  if (!document) return { rows: [], unknown: [] };
  const unknown = [];
  const rows = select(document.columns, document.count, query.q ?? "", unknown);
  return { rows: query.sort ? order(document.columns, rows, query.sort) : rows, unknown };
}

export function episodeLink(run, columns, row, query, more = {}) {
  const parts = [kindOf(columns, row), columns.step[row], columns.group_id[row], columns.episode_id[row]];
  return link(run, "episode", parts, { q: query.q, sort: query.sort, ...more });
}

export function Episodes({ run, address }) {
  const { value: document, error } = useDocument(`${run}/episodes`);
  const { query } = address;
  const line = query.q ?? "";
  const input = useRef(null);
  const [place, setPlace] = useState({ of: "", at: 0 });
  const names = (query.columns ?? DEFAULT.join(",")).split(",");
  const { rows, unknown } = useMemo(() => chosen(document, query), [document, line, query.sort]);
  const change = (changes) => replace(link(run, "episodes", [], { ...query, ...changes }));
  const of = `${line} ${query.sort}`;
  const at = place.of === of ? place.at : 0; // another filter begins at the top
  const setAt = (next) => setPlace((now) => ({ of, at: typeof next === "function" ? next(now.of === of ? now.at : 0) : next }));

  useKeys((event) => {
    if (event.key === "Escape" && event.target === input.current) return input.current.blur();
    if (isTyping(event)) return;
    const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 };
    if (event.key === "/") input.current.focus();
    else if (event.key in moves) setAt((now) => Math.max(0, Math.min(rows.length - 1, now + moves[event.key])));
    else if (event.key === "Home") setAt(0);
    else if (event.key === "End") setAt(rows.length - 1);
    else if (event.key === "Enter" && rows[at] !== undefined && !event.target.closest?.("a, button"))
      location.hash = episodeLink(run, document.columns, rows[at], query);
    else return;
    event.preventDefault();
  });

  if (error) return html`<${Problems} items=${[error.message]} />`;
  if (!document) return html`<p class="soft">Loading …</p>`;
  const rewards = rows.map((row) => document.columns.reward[row]);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / (rewards.length || 1);
  return html`<div class="bar">
      <h1>Episodes</h1>
      <input
        ref=${input}
        class="query"
        type="search"
        spellcheck="false"
        aria-label="Filter"
        placeholder="reward<1 stop_reason=max_turns lag>=1 a word     ( / )"
        value=${line}
        onInput=${(event) => change({ q: event.target.value })}
      />
      <${Columns} all=${Object.keys(document.columns)} names=${names} set=${(found) => change({ columns: found.join(",") })} />
    </div>
    <p class="soft count" role="status">
      ${rows.length.toLocaleString("en")} of ${document.count.toLocaleString("en")} episodes${rows.length > 0 && `, mean reward ${number(mean)}`}${document.sampled && html` · <span class="middle">this page holds a sample; agentrl view shows all</span>`}
      ${unknown.length > 0 && html` · <span class="bad">no column ${unknown.join(", ")}</span>`}
      ${line && html` · <button class="quiet" onClick=${() => change({ q: "" })}>clear</button>`}
    </p>
    <div class="split">
      <${Facets} document=${document} line=${line} set=${(q) => change({ q })} />
      <${Table}
        columns=${document.columns}
        names=${names.filter((name) => document.columns[name])}
        rows=${rows}
        at=${at}
        setAt=${setAt}
        sort=${query.sort ?? ""}
        setSort=${(sort) => change({ sort })}
        hrefOf=${(row) => episodeLink(run, document.columns, row, query)}
      />
    </div>
    <p class="soft keys"><kbd>j</kbd> <kbd>k</kbd> or arrows: move · <kbd>Enter</kbd>: open · <kbd>/</kbd>: filter · click a heading: sort</p>`;
}

function Table({ columns, names, rows, at, setAt, sort, setSort, hrefOf }) {
  const place = useRef(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  useEffect(() => {
    const watch = new ResizeObserver(() => setHeight(place.current?.clientHeight ?? 600));
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const node = place.current;
    const y = at * ROW;
    if (y < node.scrollTop) node.scrollTop = y;
    else if (y + 2 * ROW > node.scrollTop + node.clientHeight) node.scrollTop = y + 2 * ROW - node.clientHeight;
  }, [at]);
  const first = Math.max(0, Math.floor(top / ROW) - 8);
  const last = Math.min(rows.length, first + Math.ceil(height / ROW) + 16);
  const grid = names.map((name) => (WIDE[name] ? `minmax(${WIDE[name] / 2}px, ${WIDE[name]}fr)` : "minmax(66px, 70fr)")).join(" ");
  const next = (name) => (sort === `-${name}` ? name : sort === name ? "" : `-${name}`);
  return html`<div class="table" ref=${place} tabindex="0" role="grid" aria-label="Episodes" aria-rowcount=${rows.length + 1} onScroll=${(event) => setTop(event.target.scrollTop)}>
    <div class="row head" role="row" style=${{ gridTemplateColumns: grid }}>
      ${names.map(
        (name) => html`<div role="columnheader" aria-sort=${sort === name ? "ascending" : sort === `-${name}` ? "descending" : "none"}>
          <button onClick=${() => setSort(next(name))}>${TITLES[name] ?? name}${sort === name ? " ↑" : sort === `-${name}` ? " ↓" : ""}</button>
        </div>`,
      )}
    </div>
    <div class="rows" role="rowgroup" style=${{ height: `${rows.length * ROW}px` }}>
      ${rows.slice(first, last).map((row, offset) => {
        const number_ = first + offset;
        return html`<a
          key=${row}
          class=${`row ${number_ === at ? "at" : ""}`}
          role="row"
          aria-rowindex=${number_ + 2}
          href=${hrefOf(row)}
          tabindex="-1"
          style=${{ gridTemplateColumns: grid, transform: `translateY(${number_ * ROW}px)` }}
          onFocus=${() => setAt(number_)}
        >
          ${names.map((name) => html`<span role="gridcell" class=${typeof columns[name][row] === "number" && name !== "reward" ? "num" : ""}>${cell(columns, name, row)}</span>`)}
        </a>`;
      })}
    </div>
    ${rows.length === 0 && html`<p class="empty soft">No episode passes this filter.</p>`}
  </div>`;
}

function cell(columns, name, row) {
  const value = columns[name][row];
  if (name === "reward") return html`<${Reward} value=${value} correct=${columns.correct[row]} />`;
  if (name === "above_mean") return html`<span class=${value > 0 ? "good" : value < 0 ? "bad" : "soft"}>${value > 0 ? "+" : ""}${number(value)}</span>`;
  if (name === "step" && columns.kind[row] === "eval") return html`${value}<small class="soft"> ${columns.eval_set?.[row] || "held out"}</small>`;
  if (name === "stop_reason" && value !== "completed") return html`<span class="middle">${value}</span>`;
  if (name === "tool_errors" && value > 0) return html`<span class="bad">${value}</span>`;
  return typeof value === "number" ? number(value) : value === null ? "–" : String(value);
}

function Columns({ all, names, set }) {
  const toggle = (name) => set(names.includes(name) ? names.filter((one) => one !== name) : all.filter((one) => one === name || names.includes(one)));
  return html`<details class="menu">
    <summary>columns</summary>
    <div>${all.map((name) => html`<label><input type="checkbox" checked=${names.includes(name)} onChange=${() => toggle(name)} /> ${name}</label>`)}</div>
  </details>`;
}
