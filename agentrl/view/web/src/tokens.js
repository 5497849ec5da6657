// An episode token by token: exactly the recorded ids, coloured by what one wants to see.

import { html } from "htm/preact";
import { useMemo, useState } from "preact/hooks";
import { visible } from "./text.js";
import { number } from "./widgets.js";

const FIRST = 4000;
const COLOURS = {
  logprob: "how unlikely the token was when it was sampled: the deeper, the less likely",
  version: "which version of the policy sampled it",
  mask: "whether it is trained on",
  turn: "which turn it belongs to",
};
/** Of the learner, where the step's tokens are annotated: field, meaning, what is neutral. */
const LEARNER = {
  "log ratio": ["log_ratio_N", "log of the learner's probability over that at sampling: green, the learner finds it likelier", 0],
  weight: ["weight_N", "importance weight in use: green above 1, red below; 0 is masked or clipped", 1],
  advantage: ["advantage_N", "green: pushed up", 0],
  entropy: ["entropy_N", "how undecided the learner was, in nats: the deeper, the more", null],
};

export function Tokens({ episode, group, colour, setColour }) {
  const annotated = episode.segments.some((segment) => learnt(segment));
  const meanings = { ...COLOURS, ...(annotated && Object.fromEntries(Object.entries(LEARNER).map(([name, [, meaning]]) => [name, meaning]))) };
  const now = meanings[colour] ? colour : "logprob";
  const [over, setOver] = useState(null);
  return html`<div class="tokens-view">
    <div class="bar token-bar">
      <span class="soft">colour</span>
      ${Object.keys(meanings).map((name) => html`<button aria-pressed=${name === now} onClick=${() => setColour(name)}>${name}</button>`)}
      <span class="soft">${meanings[now]}</span>
    </div>
    <p class="token-facts" role="status">${over ? html`<${Facts} ...${over} />` : html`<span class="soft">Point at a token to see its numbers.</span>`}</p>
    ${episode.segments.map((segment, place) => html`${episode.segments.length > 1 && html`<h2 class="segment">Segment ${place + 1}</h2>`}<${Segment} key=${place} ...${{ segment, group, colour: now, setOver }} />`)}
  </div>`;
}

function Segment({ segment, group, colour, setOver }) {
  const [shown, setShown] = useState(FIRST);
  const { token_ids: ids, action_mask: mask, behavior_logprobs: logprobs, policy_versions: versions } = segment.tokens;
  const special = useMemo(() => new Set(group.special), [group]);
  const turns = useMemo(() => segment.turns.flatMap((size, turn) => Array(size.num_observation_tokens + size.num_action_tokens).fill(turn)), [segment]);
  const oldest = useMemo(() => Math.min(...versions.filter((version) => version >= 0)), [segment]);
  const numbers = useMemo(() => Object.fromEntries(Object.keys(LEARNER).map((name) => [name, learnt(segment, name)])), [segment]);
  if (!ids.length) return html`<p class="soft">No tokens were recorded: a chat endpoint played this episode.</p>`;
  const facts = (event) => {
    const place = Number(event.target.closest?.("[data-at]")?.dataset.at);
    if (!Number.isNaN(place)) setOver({ place, id: ids[place], text: group.pieces[ids[place]], sampled: mask[place], logprob: logprobs[place], version: versions[place], turn: turns[place], special: special.has(ids[place]), learner: Object.entries(numbers).filter(([, all]) => all).map(([name, all]) => [name, all[place]]) });
  };
  const tokens = [];
  let before = null;
  for (let place = 0; place < Math.min(shown, ids.length); place++) {
    const sampled = mask[place] === 1;
    const isNew = sampled && versions[place] !== before;
    if (sampled) before = versions[place];
    const text = group.pieces[ids[place]] ?? `⟨${ids[place]}⟩`;
    const style = tint(colour, { sampled, logprob: logprobs[place], age: versions[place] - oldest, turn: turns[place], value: numbers[colour]?.[place] });
    tokens.push(html`<span data-at=${place} class=${`${sampled ? "sampled" : "given"} ${special.has(ids[place]) ? "special" : ""} ${isNew ? "new-version" : ""}`} style=${style}>${isNew && html`<sup>v${versions[place]}</sup>`}${lines(text)}</span>`);
  }
  return html`<div class="tokens" dir="auto" onMouseOver=${facts}>${tokens}</div>
    ${shown < ids.length && html`<button class="more" onClick=${() => setShown(shown * 4)}>… ${(ids.length - shown).toLocaleString("en")} more tokens</button>`}`;
}

/** The learner's numbers of one name by place; null where they are not written, or where older tokens were left out. */
function learnt({ learner, tokens }, name = "weight") {
  const count = tokens.action_mask.filter(Boolean).length;
  if (learner?.tokens?.weight_N.length !== count) return null;
  const own = learner.tokens[LEARNER[name][0]];
  let next = 0;
  return tokens.action_mask.map((sampled) => (sampled ? (own.length ? own[next++] : name === "advantage" ? learner.advantage : null) : null));
}

/** A line break as a sign and a break. */
function lines(text) {
  if (!text.includes("\n")) return visible(text);
  return text.split("\n").map((line, place, all) => html`${visible(line)}${place < all.length - 1 && html`<i class="newline">⏎</i>${"\n"}`}`);
}

const STRENGTH = { "log ratio": 150, weight: 150, advantage: 60, entropy: 25 };

function tint(colour, { sampled, logprob, age, turn, value }) {
  if (LEARNER[colour]) {
    if (value === null || value === undefined) return {};
    const neutral = LEARNER[colour][2];
    const size = value - (neutral ?? 0);
    const tone = neutral === null ? "--heat" : size >= 0 ? "--good" : "--bad";
    return { background: `color-mix(in srgb, var(${tone}) ${Math.round(Math.min(70, STRENGTH[colour] * Math.abs(size)))}%, transparent)` };
  }
  if (colour === "mask") return { background: sampled ? "color-mix(in srgb, var(--good) 28%, transparent)" : "" };
  if (colour === "turn") return { background: `color-mix(in srgb, var(--c${(turn % 6) + 1}) ${sampled ? 30 : 12}%, transparent)` };
  if (!sampled) return {};
  if (colour === "version") return { background: `color-mix(in srgb, var(--c${(age % 6) + 1}) 30%, transparent)` };
  return { background: `color-mix(in srgb, var(--heat) ${Math.round(Math.min(80, -logprob * 22))}%, transparent)` };
}

function Facts({ place, id, text, sampled, logprob, version, turn, special, learner }) {
  return html`<b class="mono">${JSON.stringify(text ?? "?").slice(0, 60)}</b> <span class="soft">id</span> ${id}
    <span class="soft">place</span> ${place} <span class="soft">turn</span> ${turn + 1}
    ${sampled ? html`<span class="soft">logprob</span> ${number(logprob)} <span class="soft">probability</span> ${number(Math.exp(logprob))} <span class="soft">version</span> ${version}` : html`<span class="soft">not sampled, not trained on</span>`}
    ${sampled && learner.map(([name, value]) => html`<span class="soft">${name}</span> ${number(value)} `)}
    ${special && html`<span class="badge">special</span>`}`;
}
