// Small parts that several views use.

import { html } from "htm/preact";
import { useEffect, useRef, useState } from "preact/hooks";

export function Problems({ items }) {
  if (!items?.length) return null;
  return html`<div class="panel warning" role="status">
    <b>${items.length === 1 ? "Not everything could be read" : `${items.length} things could not be read`}</b>
    <ul>
      ${items.slice(0, 20).map((one) => html`<li>${one}</li>`)}
    </ul>
    ${items.length > 20 && html`<p>… and ${items.length - 20} more</p>`}
  </div>`;
}

export function Tile({ value, label, about }) {
  return html`<div class="tile" title=${about}><b>${value}</b><span>${label}</span></div>`;
}

export function Reward({ value, correct }) {
  const tone = correct ? "good" : value > 0 ? "middle" : "bad";
  return html`<span class="badge ${tone}">${number(value)}</span>`;
}

/** A signed bar around a middle line: right is up, left is down. */
export function Push({ value, max }) {
  const width = max ? Math.min(50, (50 * Math.abs(value)) / max) : 0;
  const left = value >= 0 ? 50 : 50 - width;
  return html`<span class="push" role="img" aria-label=${`${value >= 0 ? "up" : "down"} ${number(Math.abs(value))}`}
    ><i class=${value >= 0 ? "up" : "down"} style=${{ left: `${left}%`, width: `${width}%` }}></i
  ></span>`;
}

export function Copy({ get, label = "copy as JSON" }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(JSON.stringify(get(), null, 1));
      setSaid("copied");
    } catch {
      setSaid("the browser refused");
    }
    setTimeout(() => setSaid(""), 1500);
  };
  return html`<button class="quiet" onClick=${copy}>${said || label}</button>`;
}

/** A number for people: few digits, no noise. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 3 : size < 100 ? 2 : 1 });
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  return `${number(seconds / 3600)} h`;
}

export function percent(share) {
  return share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`;
}

/** Calls `press(event)` of the last render for every key; keys that follow each other fast see the newest state. */
export function useKeys(press) {
  const latest = useRef(press);
  latest.current = press;
  useEffect(() => {
    const listen = (event) => latest.current(event);
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}

export function isTyping(event) {
  return event.target.closest?.("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey;
}
