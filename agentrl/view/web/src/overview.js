// How the run went: results with intervals, curves, events, and why it learned or did not.

import { html } from "htm/preact";
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./chart.js";
import { link } from "./route.js";
import { Tile, duration, number, percent } from "./widgets.js";

/** Title, metric names, what it means. A chart without any of its metrics is left out. */
const CHARTS = [
  ["Reward", ["rollout/reward_mean"], "Mean reward of the episodes that were trained."],
  ["Useful groups", ["rollout/useful_groups", "rollout/useful_tokens"], "Share of finished groups whose rewards differ."],
  ["ESS ratio", ["learner/ess_ratio", "learner/ess_ratio_truncated"], "1: the data is as good as fresh; low: few episodes carry the step."],
  ["Importance weight", ["learner/mean_weight", "learner/max_weight"], "Of the learner over the policy that sampled."],
  ["Lag", ["learner/lag_mean", "learner/lag_max"], "Optimizer steps between sampling and training."],
  ["Entropy", ["learner/entropy"], "Nats a token; near 0 the model says one thing only."],
  ["KL to the sampling policy", ["learner/kl"], ""],
  ["Gradient norm", ["learner/grad_norm"], "Before clipping."],
  ["Learning rate", ["learner/lr"], "After the step scale."],
  ["Response length", ["rollout/response_tokens_mean", "rollout/response_tokens_max"], "Sampled tokens an episode."],
  ["Turns", ["rollout/turns_mean", "rollout/tool_calls_mean"], "Of an episode."],
  ["How episodes ended", ["rollout/stop_completed", "rollout/stop_max_turns", "rollout/stop_max_turn_tokens", "rollout/stop_timeout"], "Share of episodes."],
  ["Throughput", ["engine/tokens_per_s", "learner/tokens_per_s"], "Tokens a second."],
  ["Waiting", ["wait/learner_for_batch_s", "wait/rollout_for_slot_s", "wait/weights_s"], "Seconds a step."],
  ["Engine busy", ["engine/busy_share", "run/overlap"], "Share of the time."],
  ["Engine against learner", ["learner/parity_max_abs", "learner/parity_mean_abs"], "Difference of logprobs of fresh tokens, nats."],
];
const QUIET_EVENTS = new Set(["run/overlap", "run/train_s"]);

export function Overview({ run, summary }) {
  const [smoothing, setSmoothing] = useState(0);
  const [sought, setSought] = useState("");
  const steps = summary?.steps.columns;
  const charts = useMemo(() => (steps ? chartsOf(summary) : []), [summary]);
  if (!summary) return html`<p class="soft">Loading …</p>`;
  const open = (kind) => (step) => {
    location.hash = link(run, "episodes", [], { q: `kind=${kind} step=${step}` });
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
    <div class="charts">
      ${charts.main.map((one) => html`<${Chart} key=${one.title} ...${one} smoothing=${one.kind === "eval" ? 0 : smoothing} onStep=${open(one.kind)} />`)}
    </div>
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

function Events({ marks }) {
  return html`<h2>Events</h2>
    <ul class="events panel">
      ${marks.map(({ step, label }) => html`<li><span class="soft">step ${step}</span> ${label}</li>`)}
    </ul>`;
}

function chartsOf({ steps, evals, events }) {
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
  const rewards = Object.keys(steps.columns).filter((name) => name.startsWith("rollout/reward_") && name !== "rollout/reward_mean");
  const main = evals.count ? [heldOut(evals)] : [];
  const shown = new Set(["step", "time_s"]);
  for (const [title, names, about] of x.length ? CHARTS : []) {
    const all = title === "Reward" && rewards.length > 1 ? [...names, ...rewards] : names;
    const found = all.filter((name) => steps.columns[name]);
    found.forEach((name) => shown.add(name));
    if (!found.length) continue;
    const series = found.map((name) => ({ label: name.replace(/^\w+\//, ""), values: steps.columns[name] }));
    main.push({ title, about, x, series, marks, kind: "train" });
  }
  const more = Object.keys(steps.columns)
    .filter((name) => !shown.has(name))
    .sort()
    .map((name) => ({ title: name, x, series: [{ label: name, values: steps.columns[name] }], marks, kind: "train" }));
  return { main, more, marks };
}

function heldOut({ columns }) {
  const n = columns["eval/n"]?.[0];
  const band = columns["eval/avg_at_n_low"] && [columns["eval/avg_at_n_low"], columns["eval/avg_at_n_high"]];
  const series = [{ label: `avg@${n}`, values: columns["eval/avg_at_n"], band }];
  if (columns["eval/pass_at_n"] && n > 1) series.push({ label: `pass@${n}`, values: columns["eval/pass_at_n"] });
  return { title: "Held out", about: "Share of held-out episodes that solved their task, with its 95 % interval over tasks.", x: columns.step, series, marks: [], kind: "eval" };
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

function tiles({ row, evals, steps, ledger, useful }) {
  const found = [];
  const at = (name, place) => evals.columns[name]?.at(place);
  for (const [place, label] of evals.count > 1 ? [[0, "before"], [-1, "after"]] : evals.count ? [[0, ""]] : []) {
    const interval = `[${number(at("eval/avg_at_n_low", place))}, ${number(at("eval/avg_at_n_high", place))}]`;
    found.push({ value: number(at("eval/avg_at_n", place)), label: `avg@${at("eval/n", place)} ${label} ${interval}`, about: "Share of the held-out episodes that solved their task, with its 95 % interval over tasks." });
  }
  found.push({ value: row.num_steps ? `${row.steps} / ${number(row.num_steps)}` : number(row.steps), label: "steps", about: "Optimizer steps. Each makes a new version of the policy." });
  if (row.started_s) found.push({ value: duration(row.ended_s - row.started_s), label: "first to last measurement", about: "Training, waiting and evaluations." });
  const overlap = steps.columns["run/overlap"]?.at(-1);
  if (overlap !== undefined && overlap !== null) found.push({ value: percent(overlap), label: "async overlap", about: "Share of the learner's working time during which the engine generated." });
  if (useful !== null && useful !== undefined) found.push({ value: percent(useful), label: "of the groups were useful", about: "Groups whose rewards differ; the others leave no gradient." });
  const issued = Object.values(ledger).reduce((sum, count) => sum + count, 0);
  if (issued) found.push({ value: number(issued), label: `groups issued, ${number(ledger.trained ?? 0)} trained`, about: "Where each went is in the ledger." });
  return found;
}
