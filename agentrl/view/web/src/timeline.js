// When everything happened: a lane for each episode above one clock, with the learner, the weight updates and the engine.

import { html } from "htm/preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useDocument } from "./main.js";
import { kindOf, link, replace } from "./route.js";
import { source } from "./store.js";
import { Problems, Tile, duration, isTyping, number, percent } from "./widgets.js";

const ROW = 11;
const HEAD = 84; // learner, weights, engine, the clock
const LABEL = 76;
const FIRST = 300; // lanes that are shown before somebody chooses
const MAX_TABLE = 200;
const STATES = {
  start: ["--line", "starting: the environment's reset"],
  generate: ["--c1", "generating, the engine's queue included"],
  tool: ["--c2", "tools and environment"],
  end: ["--line", "ending"],
  play: ["--c6", "played; its turns have no times"],
  group: ["--middle", "waiting for its group"],
  buffer: ["--c3", "in the buffer"],
  train: ["--good", "in the batch that was trained"],
};

export function Timeline({ run, address }) {
  const { value: document, error } = useDocument(`${run}/timeline`);
  if (error) return html`<${Problems} items=${[error.message]} />`;
  if (!document) return html`<p class="soft">Loading …</p>`;
  return html`<h1>When everything happened</h1>
    ${document.lanes.count ? html`<${Lanes} ...${{ run, address, document }} />` : html`<p class="panel">No episode of this run says when it was played: it has none yet, or an older agentrl made it.</p>`}`;
}

function Lanes({ run, address, document }) {
  const { columns, count } = document.lanes;
  const whole = useMemo(() => extent(document), [document]);
  const near = useMemo(() => lastSteps(columns, count, whole), [columns, count, whole]);
  const [from, to] = windowOf(address.query, near, whole);
  const rows = useMemo(() => Array.from({ length: count }, (_, row) => row).filter((row) => endOf(columns, row) >= from && columns.started[row] <= to), [columns, count, from, to]);
  const [at, setAt] = useState(null);
  const set = (low, high) => replace(link(run, "timeline", [], { ...address.query, from: seconds(Math.max(low, whole[0])), to: seconds(Math.min(high, whole[1])) }));
  const open = (row) => (location.hash = link(run, "episode", [kindOf(columns, row), columns.step[row], columns.group_id[row], columns.episode_id[row]]));
  const width = to - from;
  const shift = (by) => {
    const kept = Math.max(whole[0] - from, Math.min(whole[1] - to, by));
    set(from + kept, to + kept);
  };
  const zoom = (factor) => set((from + to) / 2 - (factor * width) / 2, (from + to) / 2 + (factor * width) / 2);
  const chosen = rows.includes(at) ? at : null;
  const press = (event) => {
    if (isTyping(event)) return;
    const place = rows.indexOf(chosen);
    const moves = { ArrowLeft: () => shift(-width / 4), ArrowRight: () => shift(width / 4), "+": () => zoom(0.5), "-": () => zoom(2), ArrowDown: () => setAt(rows[Math.min(rows.length - 1, place + 1)]), ArrowUp: () => setAt(rows[Math.max(0, place - 1)]), Enter: () => chosen !== null && open(chosen) };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  };
  return html`<div class="tiles below">
      ${document.learner_idle !== null && html`<${Tile} value=${percent(document.learner_idle)} label="the learner waited for a batch" about="Share of the time between its first batch and its last step." />`}
      ${document.engine_idle !== null && html`<${Tile} value=${percent(document.engine_idle)} label="the engine had nothing to do" about="Share of the time of all steps." />`}
      <${Tile} value=${number(count)} label="episodes with times" about="Trained and held-out ones." />
      <${Tile} value=${number(document.num_dropped)} label="groups not trained, without lanes" about="Dropped, failed or cancelled: their episodes are not kept. The ledger says why." />
    </div>
    <div class="bar">
      <button onClick=${() => set(...whole)}>all</button><button onClick=${() => set(...near)}>last steps</button><button onClick=${() => zoom(0.5)} aria-label="zoom in">+</button><button onClick=${() => zoom(2)} aria-label="zoom out">−</button>
      <span class="soft" role="status">${number(rows.length)} episodes, ${duration(width)} from ${clock(from)}</span>
      <span class="soft">drag: zoom · double click: all · click: the episode</span><span class="grow"></span>
      ${source === "server" ? html`<a class="button" href=${`doc/${encodeURIComponent(run)}/trace`} download=${`${run}-trace.json`}>trace for Perfetto</a>` : html`<span class="soft">agentrl export RUN --to trace: for Perfetto</span>`}
    </div>
    ${notes(document).map((note) => html`<p class="soft">${note}</p>`)}
    <div class="legend-line">${Object.entries(STATES).map(([name, [colour, about]]) => html`<span><i style=${{ background: `var(${colour})` }}></i>${about}</span>`)}</div>
    <${Picture} ...${{ document, rows, from, to, at: chosen, setAt, set, open, press, all: () => set(...whole) }} />
    <p class="timeline-facts" aria-live="polite">${chosen === null ? html`<span class="soft">Point at a lane, or use the arrow keys.</span>` : html`<a href=${link(run, "episode", [kindOf(columns, chosen), columns.step[chosen], columns.group_id[chosen], columns.episode_id[chosen]])}>${columns.episode_id[chosen]}</a> reward ${number(columns.reward[chosen])}, ${said(columns, chosen)}`}</p>
    <${Table} ...${{ run, columns, rows }} />
    <p class="soft keys"><kbd>←</kbd> <kbd>→</kbd>: earlier, later · <kbd>+</kbd> <kbd>-</kbd>: zoom · <kbd>↑</kbd> <kbd>↓</kbd>: lanes · <kbd>Enter</kbd>: open</p>`;
}

function notes({ num_without_times, num_older, sampled }) {
  return [
    num_without_times > 0 && `${number(num_without_times)} episodes have no times: an older agentrl played them.`,
    num_older > 0 && `The newest episodes: ${number(num_older)} older ones are in agentrl export RUN --to trace.`,
    sampled && "The episodes of a sample of the steps: agentrl view shows all.",
  ].filter(Boolean);
}

function Table({ run, columns, rows }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>the same as a table</summary>
    ${isOpen && html`<div class="scroll"><table>
      <thead><tr><th scope="col">episode</th><th scope="col">starts at</th>${["generating", "tools", "waits for its group", "in the buffer", "until it is trained"].map((name) => html`<th scope="col">${name}, s</th>`)}</tr></thead>
      <tbody>${rows.slice(0, MAX_TABLE).map((row) => {
        const sums = spent(columns, row);
        return html`<tr><td><a href=${link(run, "episode", [kindOf(columns, row), columns.step[row], columns.group_id[row], columns.episode_id[row]])}>${columns.episode_id[row]}</a></td><td class="num">${clock(columns.started[row])}</td>${["generate", "tool", "group", "buffer", "train"].map((name) => html`<td class="num">${number(sums[name])}</td>`)}</tr>`;
      })}</tbody>
    </table></div>${rows.length > MAX_TABLE && html`<p class="soft">The first ${MAX_TABLE} of ${number(rows.length)}.</p>`}`}
  </details>`;
}

function Picture({ document, rows, from, to, at, setAt, set, open, press, all }) {
  const scroller = useRef(null);
  const canvas = useRef(null);
  const latest = useRef({});
  latest.current = { document, rows, from, to, at };
  const draw = () => scroller.current && paint(canvas.current, scroller.current, latest.current);
  useEffect(draw);
  useEffect(() => {
    const watch = new ResizeObserver(draw);
    watch.observe(scroller.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    addEventListener("themechange", draw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", draw);
      removeEventListener("themechange", draw);
    };
  }, []);
  useEffect(() => {
    const place = rows.indexOf(at);
    const node = scroller.current;
    if (place < 0) return;
    const y = HEAD + place * ROW;
    if (y < node.scrollTop + HEAD) node.scrollTop = y - HEAD;
    else if (y + ROW > node.scrollTop + node.clientHeight) node.scrollTop = y + ROW - node.clientHeight;
  }, [at]);

  const drag = useRef(null);
  const where = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const place = Math.floor((y - HEAD + scroller.current.scrollTop) / ROW);
    return { time: from + ((x - LABEL) / (box.width - LABEL)) * (to - from), row: y > HEAD ? rows[place] : undefined, x };
  };
  const down = (event) => (drag.current = where(event));
  const move = (event) => {
    const { row } = where(event);
    if (row !== undefined && row !== at) setAt(row);
  };
  const up = (event) => {
    const began = drag.current;
    drag.current = null;
    if (!began) return;
    const { time, row, x } = where(event);
    if (Math.abs(x - began.x) > 5) set(Math.min(began.time, time), Math.max(began.time, time));
    else if (event.detail === 1 && row !== undefined) open(row);
  };
  return html`<div class="lanes" ref=${scroller} onScroll=${draw} tabindex="0" role="application" aria-label=${`Timeline of ${rows.length} episodes; the table below has the same`} onKeyDown=${press}>
    <canvas ref=${canvas} aria-hidden="true" onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onDblClick=${all}></canvas>
    <div style=${{ height: `${Math.max(0, HEAD + rows.length * ROW - heightOf(rows))}px` }}></div>
  </div>`;
}

/** Of the canvas: what can be seen of it at once. */
function heightOf(rows) {
  return Math.min(Math.round(0.6 * innerHeight), HEAD + rows.length * ROW + 4);
}

function paint(canvas, scroller, { document, rows, from, to, at }) {
  const ratio = devicePixelRatio || 1;
  const width = scroller.clientWidth;
  const height = heightOf(rows);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const style = getComputedStyle(window.document.documentElement);
  const colours = new Map();
  const colour = (name) => colours.get(name) ?? colours.set(name, style.getPropertyValue(name).trim()).get(name);
  const x = (time) => LABEL + ((time - from) / (to - from)) * (width - LABEL);
  const bar = (low, high, y, tall, name, alpha = 1) => {
    if (high < from || low > to || high <= low) return;
    ctx.globalAlpha = alpha;
    ctx.fillStyle = colour(name);
    const left = Math.max(LABEL, x(low));
    ctx.fillRect(left, y, Math.max(0.75, Math.min(width, x(high)) - left), tall);
    ctx.globalAlpha = 1;
  };
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";

  const { columns } = document.lanes;
  const first = Math.floor(scroller.scrollTop / ROW);
  for (let place = first; place < rows.length && HEAD + (place - first) * ROW < height + ROW; place++) {
    const row = rows[place];
    const y = HEAD + place * ROW - scroller.scrollTop;
    if (row === at) bar(from, to, y, ROW, "--hover");
    walk(columns, row, (state, low, high) => bar(low, high, y + 2, ROW - 4, STATES[state][0], state === "buffer" || state === "group" ? 0.45 : 1));
    if (row === at || place % 4 === 0) {
      ctx.fillStyle = colour(row === at ? "--ink" : "--soft");
      ctx.fillText(`${columns.kind[row] === "train" ? "step" : "eval"} ${columns.step[row]}`, 6, y + ROW / 2);
    }
  }

  ctx.fillStyle = colour("--card");
  ctx.fillRect(0, 0, width, HEAD);
  for (const [name, y] of [["learner", 12], ["weights", 32], ["engine", 52]]) {
    ctx.fillStyle = colour("--soft");
    ctx.fillText(name, 6, y);
  }
  for (const one of document.steps) {
    bar(one.waited, one.taken, 8, 8, "--line");
    bar(one.taken, one.stepped, 5, 14, "--good");
    bar(one.stepped, one.held, 26, 12, "--c4");
    if (one.engine_busy !== null) {
      const tall = 14 * one.engine_busy;
      bar(one.since, one.held, 45, 14, "--line", 0.5);
      bar(one.since, one.held, 59 - tall, tall, "--c1");
    }
    if (one.held < from || one.held > to) continue;
    ctx.fillStyle = colour("--c4");
    ctx.globalAlpha = 0.4;
    ctx.fillRect(x(one.held), 26, 1, height);
    ctx.globalAlpha = 1;
  }
  let free = LABEL;
  for (const one of document.steps) {
    const at_ = x(one.held);
    if (at_ < free || at_ > width - 20) continue;
    ctx.fillStyle = colour("--c4");
    ctx.fillText(`v${one.step}`, at_ + 2, 74);
    free = at_ + 40;
  }
  ctx.fillStyle = colour("--soft");
  ctx.fillText("version", 6, 74);
  ctx.fillStyle = colour("--line");
  ctx.fillRect(0, HEAD - 1, width, 1);
}

/** Calls `tell(state, from, to)` for what an episode did, in order. */
function walk(columns, row, tell) {
  const times = columns.generating[row];
  let at = columns.started[row];
  for (let turn = 0; turn < times.length; turn += 2) {
    tell(turn ? "tool" : "start", at, times[turn]);
    tell("generate", times[turn], times[turn + 1]);
    at = times[turn + 1];
  }
  tell(times.length ? "end" : "play", at, columns.played[row]);
  tell("group", columns.played[row], columns.ready[row]);
  if (columns.taken[row] !== null) {
    tell("buffer", columns.ready[row], columns.taken[row]);
    tell("train", columns.taken[row], columns.stepped[row]);
  }
}

function spent(columns, row) {
  const sums = { generate: 0, tool: 0, group: 0, buffer: null, train: null };
  walk(columns, row, (state, low, high) => state in sums && (sums[state] = (sums[state] ?? 0) + Math.max(0, high - low)));
  return sums;
}

function said(columns, row) {
  const sums = spent(columns, row);
  const parts = [["generated", sums.generate], ["tools", sums.tool], ["waited for its group", sums.group], ["in the buffer", sums.buffer]];
  return `${columns.kind[row] === "train" ? "step" : "held out, version"} ${columns.step[row]}: ${parts.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value)} s`).join(", ")}`;
}

function endOf(columns, row) {
  return columns.stepped[row] ?? columns.ready[row];
}

function extent({ lanes: { columns, count }, steps }) {
  let [low, high] = [0, 1];
  for (let row = 0; row < count; row++) high = Math.max(high, endOf(columns, row));
  for (const one of steps) high = Math.max(high, one.held);
  return [low, high * 1.001];
}

/** The end of the run, with about FIRST lanes. */
function lastSteps(columns, count, whole) {
  return count <= FIRST ? whole : [columns.started[count - FIRST], whole[1]];
}

function windowOf({ from, to }, near, whole) {
  const [low, high] = [Number(from), Number(to)];
  return from !== undefined && to !== undefined && high > low ? [low, high] : near[1] > near[0] ? near : whole;
}

function seconds(value) {
  return String(Number(value.toFixed(3)));
}

function clock(value) {
  const whole = Math.floor(value);
  const two = (part) => String(part).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
