// The messages of an episode: who said what, thoughts folded, code highlighted, tools with their answers.

import { html } from "htm/preact";
import { Code, Text, terminal, visible } from "./text.js";

const THOUGHT = /<think>([\s\S]*?)(<\/think>|$)/g;
const CODE_KEYS = { code: "python", python: "python", script: "python", command: "bash", cmd: "bash" };
const TRUNCATED = /\.\.\. ?[^\n]{0,60}\b(cut|truncated|left out|omitted)\b/i;
const FAILED = /^(Traceback \(most recent call last\)|\w*(Error|Exception)\b|error:)/im;

export function Transcript({ episode, task }) {
  return html`<div class="transcript">
    ${task.answer !== null && html`<p class="gold"><span class="soft">gold answer</span> <b>${visible(task.answer)}</b></p>`}
    ${episode.segments.map(
      (segment, place) => html`${episode.segments.length > 1 && html`<h2 class="segment">Segment ${place + 1} of ${episode.segments.length}</h2>`}<${Messages} key=${place} segment=${segment} />`,
    )}
    <p class="ending soft">ended: <b>${episode.row.stop_reason}</b></p>
  </div>`;
}

function Messages({ segment }) {
  let turn = -1;
  return segment.messages.map((message, place) => {
    if (message.role === "assistant") turn++;
    return html`<${Message} key=${place} message=${message} size=${message.role === "assistant" ? segment.turns[turn] : null} turn=${turn} />`;
  });
}

export function Message({ message, size, turn }) {
  const { role, content } = message;
  const failed = role === "tool" && FAILED.test(content.slice(0, 4000));
  return html`<article class="message ${role} ${failed ? "failed" : ""}">
    <header>
      <b>${role}</b>
      ${role === "assistant" && turn >= 0 && html`<span class="soft">turn ${turn + 1}</span>`}
      ${size && html`<span class="soft">${size.num_action_tokens} tokens${size.finish_reason === "stop" ? "" : `, cut: ${size.finish_reason}`}</span>`}
      ${message.tool_call_id && html`<span class="soft">${message.tool_call_id}</span>`}
      ${failed && html`<span class="badge bad">failed</span>`}
      ${role === "tool" && TRUNCATED.test(content) && html`<span class="badge middle">truncated</span>`}
    </header>
    <${Content} content=${content} role=${role} />
    ${message.tool_calls.map((call) => html`<${Call} call=${call} />`)}
    ${!content && !message.tool_calls.length && html`<p class="soft">(empty)</p>`}
  </article>`;
}

function Content({ content, role }) {
  if (!content) return null;
  if (role === "tool") return html`<${Text} text=${content} as=${terminal} className="mono" />`;
  if (role === "system") return content.length > 600 ? html`<details><summary>${content.length.toLocaleString("en")} characters</summary><${Text} text=${content} /></details>` : html`<${Text} text=${content} />`;
  const parts = [];
  let end = 0;
  for (const found of content.matchAll(THOUGHT)) {
    parts.push(content.slice(end, found.index), { thought: found[1] });
    end = found.index + found[0].length;
  }
  parts.push(content.slice(end));
  return parts.map((part) =>
    part.thought !== undefined
      ? html`<details class="thought"><summary>thinking, ${part.thought.length.toLocaleString("en")} characters</summary><${Text} text=${part.thought} /></details>`
      : part.trim() && html`<${Text} text=${part} />`,
  );
}

function Call({ call }) {
  const values = Object.entries(call.arguments);
  return html`<div class="call">
    <div class="call-name">${visible(call.name)}<span class="soft">(${values.map(([name]) => name).join(", ")})</span></div>
    ${values.map(([name, value]) =>
      typeof value === "string"
        ? html`${values.length > 1 && html`<span class="soft">${visible(name)}</span>`}<${Code} text=${value} language=${CODE_KEYS[name] ?? ""} />`
        : html`${values.length > 1 && html`<span class="soft">${visible(name)}</span>`}<${Code} text=${JSON.stringify(value, null, 1)} language="json" />`,
    )}
  </div>`;
}
