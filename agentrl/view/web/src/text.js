// What models and tools wrote, as inert text: never HTML, signs that reorder or hide text made visible, long texts cut.

import { html } from "htm/preact";
import { useState } from "preact/hooks";
import hljs from "highlight.js/lib/core";
import python from "highlight.js/lib/languages/python";
import json from "highlight.js/lib/languages/json";
import bash from "highlight.js/lib/languages/bash";

hljs.registerLanguage("python", python);
hljs.registerLanguage("json", json);
hljs.registerLanguage("bash", bash);

const FIRST = 12_000;
const MAX_HIGHLIGHTED = 40_000;
// Controls, bidirectional marks, zero-width signs, byte order mark, lone surrogates.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const COLOUR = /\u001b\[([0-9;]*)m/g;
const OTHER_ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;

/** Text nodes, with hidden signs as small labels such as U+202E. */
export function visible(text) {
  const out = [];
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    out.push(text.slice(end, found.index));
    const code = found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    out.push(html`<span class="hidden-sign" title="a sign that is not visible">U+${code}</span>`);
    end = found.index + found[0].length;
  }
  return end ? [...out, text.slice(end)] : text;
}

/** Text with the terminal's colours; its other escape sequences are left out. */
export function terminal(text) {
  if (!text.includes("\u001b")) return visible(text);
  const out = [];
  let style = "";
  let end = 0;
  for (const found of [...text.matchAll(COLOUR), null]) {
    const piece = text.slice(end, found?.index).replace(OTHER_ESCAPES, "");
    if (piece) out.push(style ? html`<span class=${style}>${visible(piece)}</span>` : visible(piece));
    if (!found) break;
    style = styleOf(found[1], style);
    end = found.index + found[0].length;
  }
  return out;
}

function styleOf(codes, before) {
  let names = new Set(before.split(" ").filter(Boolean));
  for (const code of (codes || "0").split(";").map(Number)) {
    if (code === 0) names = new Set();
    else if (code === 1) names.add("ansi-bold");
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) {
      names = new Set([...names].filter((name) => !name.startsWith("ansi-c")));
      names.add(`ansi-c${code % 10}`);
    }
  }
  return [...names].join(" ");
}

/** A text as it is, with line breaks; a long one in parts. `as`: a function that makes nodes of a text. */
export function Text({ text, as = visible, className = "" }) {
  const [shown, setShown] = useState(FIRST);
  const rest = text.length - shown;
  return html`<pre class=${`text ${className}`} dir="auto">${as(rest > 0 ? text.slice(0, shown) : text)}${
    rest > 0 &&
    html`<button class="more" onClick=${() => setShown(shown * 8)}>… ${rest.toLocaleString()} more characters</button>`
  }</pre>`;
}

export function Code({ text, language }) {
  const as = (shown) => (shown.length <= MAX_HIGHLIGHTED ? highlighted(shown, language) : visible(shown));
  return html`<${Text} text=${text} as=${as} className="code" />`;
}

function highlighted(text, language) {
  if (!hljs.getLanguage(language)) return visible(text);
  return nodes(hljs.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);
}

function nodes(node) {
  if (typeof node === "string") return visible(node);
  const children = node.children.map(nodes);
  return node.scope ? html`<span class=${`hl-${node.scope.split(".")[0]}`}>${children}</span>` : children;
}
