// How the run went: results with intervals, curves, events, and why it learned or did not.

import { html } from "htm/preact";
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./chart.js";
import { link } from "./route.js";
import { Tile, duration, number, percent } from "./widgets.js";

const QUIET_EVENTS = new Set(["run/overlap", "run/train_s"]);

export function Overview({ run, summary }) {
  const [smoothing, setSmoothing] = useState(0);
  const [sought, setSought] = useState("");
  const steps = summary?.steps.columns;
  const charts = useMemo(() => (steps ? chartsOf(summary) : []), [summary]);
  if (!summary) return html`<p class="soft">Loading …</p>`;
  const open = (kind, set = "") => (step) => {
    location.hash = link(run, "episodes", [], { q: `kind=${kind}${set && ` eval_set=${set}`} step=${step}` });
  };
  const others = charts.more.filter(({ title }) => sought && title.includes(sought.trim()));
  return html`<h1>${summary.row.run}</h1>
    <p class="soft">${subtitle(summary)}</p>
    ${summary.row.state !== "done" && html`<p class="panel ${summary.row.state === "running" ? "" : "warning"}">${summary.row.sentence}</p>`}
    ${summary.headline && html`<p class="headline">${summary.headline}</p>`}
    ${summary.diagnosis && html`<p class="panel warning">${summary.diagnosis}</p>`}
    <div class="tiles">${tiles(summary).map((one) => html`<${Tile} ...${one} />`)}</div>
    ${
      summary.steps.count === 0
        ? html`<p class="panel">No step was finished yet. The folder logs/ says what each part does.</p>`
        : html`<div class="bar">
            <h2>Curves</h2>
            <label>smooth <input type="range" min="0" max="0.97" step="0.01" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} /></label>
            <span class="soft">drag: zoom · double click: all · click a step: its episodes</span>
          </div>`
    }
    ${summary.waits && html`<p class="soft">${summary.waits}</p>`}
    <div class="charts">
      ${charts.main.map((one) => html`<${Chart} key=${one.title} ...${one} smoothing=${one.kind === "eval" ? 0 : smoothing} onStep=${open(one.kind, one.set)} />`)}
    </div>
    ${charts.why.length > 0 && html`<${Why} charts=${charts.why} smoothing=${smoothing} open=${open("train")} />`}
    ${charts.marks.length > 0 && html`<${Events} marks=${charts.marks} />`}
    ${
      charts.more.length > 0 &&
      html`<div class="bar">
          <h2>Every other metric</h2>
          <input type="search" list="metrics" aria-label="Find a metric" placeholder="find one of ${charts.more.length}: learner/ …" value=${sought} onInput=${(event) => setSought(event.target.value)} />
          <datalist id="metrics">${charts.more.map(({ title }) => html`<option value=${title} />`)}</datalist>
        </div>
        <div class="charts">
          ${others.slice(0, 24).map((one) => html`<${Chart} key=${one.title} ...${one} smoothing=${smoothing} onStep=${open("train")} />`)}
        </div>
        ${others.length > 24 && html`<p class="soft">… and ${others.length - 24} more; type more of the name</p>`}`
    }`;
}

/** Charts by lag and length, and of variances, which explain the others; drawn when somebody opens them. */
function Why({ charts, smoothing, open }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="why" open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${charts.length} more charts: by lag, by length, variance of the gradient</summary>
    ${isOpen && html`<div class="charts">${charts.map((one) => html`<${Chart} key=${one.title} ...${one} smoothing=${smoothing} onStep=${open} />`)}</div>`}
  </details>`;
}

function Events({ marks }) {
  return html`<h2>Events</h2>
    <ul class="events panel">
      ${marks.map(({ step, label }) => html`<li><span class="soft">step ${step}</span> ${label}</li>`)}
    </ul>`;
}

function chartsOf({ steps, held_out, events, charts }) {
  const x = steps.columns.step;
  const marks = [
    ...events.flatMap(({ step, values }) =>
      Object.entries(values)
        .filter(([name]) => !QUIET_EVENTS.has(name))
        .map(([name, value]) => ({ step, label: `${name} = ${number(value)}`, tone: "soft" })),
    ),
    ...(steps.columns["learner/skipped_steps"] ?? []).flatMap((count, row) =>
      count > (steps.columns["learner/skipped_steps"][row - 1] ?? 0)
        ? [{ step: x[row], label: "the step was refused", tone: "bad" }]
        : [],
    ),
  ];
  const main = held_out.map(heldOut);
  const why = [];
  const shown = new Set(["step", "time_s"]);
  for (const { title, curves, note, stacked } of x.length ? charts : []) {
    const names = Object.values(curves);
    names.forEach((name) => shown.add(name));
    const series = Object.entries(curves).map(([label, name]) => ({ label, values: steps.columns[name] }));
    (names.every((name) => name.startsWith("vitals/")) ? why : main).push({ title, about: note, x, series, stacked, marks, kind: "train" });
  }
  const more = Object.keys(steps.columns)
    .filter((name) => !shown.has(name))
    .sort()
    .map((name) => ({ title: name, x, series: [{ label: name, values: steps.columns[name] }], marks, kind: "train" }));
  return { main, why, more, marks };
}

function heldOut({ name, columns }) {
  const n = columns["eval/n"]?.[0];
  const band = columns["eval/avg_at_n_low"] && [columns["eval/avg_at_n_low"], columns["eval/avg_at_n_high"]];
  const series = [{ label: `avg@${n}`, values: columns["eval/avg_at_n"], band }];
  if (columns["eval/pass_at_n"] && n > 1) series.push({ label: `pass@${n}`, values: columns["eval/pass_at_n"] });
  return { title: `Held out${name && `, ${name}`}`, set: name, about: "Share of held-out episodes that solved their task, with its 95 % interval over tasks.", x: columns.step, series, marks: [], kind: "eval" };
}

function subtitle({ row, config }) {
  const { rollout = {}, algorithm = {}, learner = {} } = config;
  return [
    row.env,
    row.model,
    rollout.groups_per_step && `${rollout.groups_per_step} groups of ${rollout.group_size} a step`,
    rollout.max_lag !== undefined && `max lag ${rollout.max_lag ?? "none"}`,
    algorithm.preset,
    algorithm.baseline && `baseline ${algorithm.baseline}`,
    learner.lr && `lr ${learner.lr}`,
    config.seed !== undefined && `seed ${config.seed}`,
  ].filter(Boolean).join(" · ");
}

function tiles({ row, held_out, steps, ledger, useful }) {
  const found = held_out.flatMap(measured);
  found.push({ value: row.num_steps ? `${row.steps} / ${number(row.num_steps)}` : number(row.steps), label: "steps", about: "Optimizer steps. Each makes a new version of the policy." });
  if (row.started_s) found.push({ value: duration(row.ended_s - row.started_s), label: "first to last measurement", about: "Training, waiting and evaluations." });
  const overlap = steps.columns["run/overlap"]?.at(-1);
  if (overlap !== undefined && overlap !== null) found.push({ value: percent(overlap), label: "async overlap", about: "Share of the learner's working time during which the engine generated." });
  if (useful !== null && useful !== undefined) found.push({ value: percent(useful), label: "of the groups were useful", about: "Groups whose rewards differ; the others leave no gradient." });
  const issued = Object.values(ledger).reduce((sum, count) => sum + count, 0);
  if (issued) found.push({ value: number(issued), label: `groups issued, ${number(ledger.trained ?? 0)} trained`, about: "Where each went is in the ledger." });
  return found;
}

/** Before and after, of one held-out set. */
function measured({ name, columns, count }) {
  const at = (metric, place) => columns[`eval/${metric}`]?.at(place);
  return (count > 1 ? [[0, "before"], [-1, "after"]] : [[0, ""]]).map(([place, when]) => ({
    value: number(at("avg_at_n", place)),
    label: `${name && `${name}: `}avg@${at("n", place)} ${when} [${number(at("avg_at_n_low", place))}, ${number(at("avg_at_n_high", place))}]`,
    about: "Share of the held-out episodes that solved their task, with its 95 % interval over tasks.",
  }));
}
