// One curve chart: uPlot with the page's colours, a shared cursor, zoom that all charts follow, smoothing, and marks.

import { html } from "htm/preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number } from "./widgets.js";

const HEIGHT = 190;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const shared = uPlot.sync("steps");
const charts = new Set();
let isZooming = false;

/** An exponential moving average; gaps stay gaps. `share` of the old value, from 0. */
export function smooth(values, share) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = mean === null ? value : share * mean + (1 - share) * value;
    return mean;
  });
}

/**
 * `series`: {label, values, band: [low, high]?}; `x`: steps, ascending; `marks`: {step, label, tone}.
 * `stacked`: each series on top of those before it, which suits parts of a whole.
 * `onStep(step)` is called when somebody clicks a step.
 */
export function Chart({ title, about, x, series: given, smoothing = 0, stacked = false, marks = [], onStep }) {
  const series = useMemo(() => (stacked && given.some(happened) ? given.filter(happened) : given), [given, stacked]);
  const place = useRef(null);
  const latest = useRef({});
  latest.current = { onStep };

  useEffect(() => {
    const node = place.current;
    let plot = null;
    const draw = () => {
      const zoom = plot?.scales.x;
      const kept = plot && zoom.min > x[0] ? [zoom.min, zoom.max] : null;
      dispose();
      plot = new uPlot(options(node, { x, series, smoothing, stacked, marks, latest }), data(x, series, smoothing, stacked), node);
      charts.add(plot);
      if (kept) plot.setScale("x", { min: kept[0], max: kept[1] });
    };
    const dispose = () => {
      if (plot) charts.delete(plot);
      plot?.destroy();
      plot = null;
    };
    draw();
    const watch = new ResizeObserver(() => plot && plot.setSize({ width: node.clientWidth, height: HEIGHT }));
    watch.observe(node);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    addEventListener("themechange", draw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", draw);
      removeEventListener("themechange", draw);
      dispose();
    };
  }, [x, series, smoothing, stacked, marks]);

  const last = series[0]?.values.findLast((value) => value !== null && value !== undefined);
  return html`<figure class="chart">
    <figcaption><b>${title}</b>${series.length === 1 && html`<span class="soft">${number(last)}</span>`}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: a curve over ${x.length} steps, last ${number(last)}`}></div>
    ${about && html`<p class="soft">${about}</p>`}
  </figure>`;
}

/** Each series on top of those before it. */
function sums(series, smoothing) {
  let below = null;
  return series.map(({ values }) => {
    const own = smoothing ? smooth(values, smoothing) : values;
    below = own.map((value, row) => (value ?? 0) + (below ? below[row] : 0));
    return below;
  });
}

function data(x, series, smoothing, stacked) {
  if (stacked) return [x, ...sums(series, smoothing)];
  const columns = [x];
  for (const one of series) {
    if (one.band) columns.push(one.band[0], one.band[1]);
    if (smoothing) columns.push(one.values);
    columns.push(smoothing ? smooth(one.values, smoothing) : one.values);
  }
  return columns;
}

function options(node, { x, series, smoothing, stacked, marks, latest }) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const lines = [{ label: "step" }];
  const bands = [];
  series.forEach((one, place) => {
    const stroke = colour(COLOURS[place % COLOURS.length]);
    const value = stacked ? (_plot, _sum, _series, row) => number(row === null ? null : one.values[row]) : (_, found) => number(found);
    if (stacked) {
      if (place) bands.push({ series: [lines.length, lines.length - 1], fill: `${stroke}55` });
      lines.push({ label: one.label, stroke, width: 1.2, fill: place ? undefined : `${stroke}55`, points: { show: false }, value });
      return;
    }
    if (one.band) {
      bands.push({ series: [lines.length + 1, lines.length], fill: `${stroke}2b` });
      lines.push({ label: "low", class: "band", stroke: "transparent", value, points: { show: false } });
      lines.push({ label: "high", class: "band", stroke: "transparent", value, points: { show: false } });
    }
    if (smoothing) lines.push({ label: `${one.label} (raw)`, stroke: `${stroke}40`, width: 1, points: { show: false }, value });
    const points = { show: x.length < 40, size: 5, fill: stroke };
    lines.push({ label: one.label, stroke, width: 1.8, spanGaps: true, points, value });
  });
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const font = "11px system-ui, sans-serif";
  return {
    width: Math.max(200, node.clientWidth),
    height: HEIGHT,
    series: lines,
    bands,
    scales: { x: { time: false } },
    axes: [{ ...axis, font, size: 26 }, { ...axis, font, size: 52, values: (_, ticks) => ticks.map(number) }],
    cursor: { sync: { key: shared.key, setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
    legend: { live: true },
    padding: [10, 12, 0, 0],
    hooks: {
      setScale: [(plot, key) => key === "x" && follow(plot)],
      draw: [(plot) => drawMarks(plot, marks, colour)],
      ready: [(plot) => plot.over.addEventListener("click", () => clicked(plot, x, latest.current.onStep))],
    },
  };
}

/** What never happened would only fill the legend. */
function happened({ values }) {
  return values.some(Boolean);
}

/** All charts show the same steps. */
function follow(plot) {
  if (isZooming) return;
  isZooming = true;
  const { min, max } = plot.scales.x;
  const isAll = min === plot.data[0][0] && max === plot.data[0].at(-1);
  for (const other of charts) {
    if (other === plot) continue;
    const steps = other.data[0];
    other.setScale("x", isAll ? { min: steps[0], max: steps.at(-1) } : { min, max });
  }
  isZooming = false;
}

function clicked(plot, x, onStep) {
  const { idx, left } = plot.cursor;
  if (onStep && left >= 0 && idx !== null && plot.select.width < 3) onStep(x[idx]);
}

function drawMarks(plot, marks, colour) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  for (const { step, tone } of marks) {
    const at = Math.round(plot.valToPos(step, "x", true));
    if (at < left || at > left + width) continue;
    ctx.save();
    ctx.strokeStyle = colour(tone === "bad" ? "--bad" : "--soft");
    ctx.lineWidth = 1;
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
    ctx.restore();
  }
}
