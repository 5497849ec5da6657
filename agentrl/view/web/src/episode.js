// One episode: what was said and done, or token by token, with its siblings one click away.

import { html } from "htm/preact";
import { useMemo } from "preact/hooks";
import { useDocument } from "./main.js";
import { chosen, episodeLink } from "./episodes.js";
import { asFilter, kindOf, link } from "./route.js";
import { Tokens } from "./tokens.js";
import { Transcript } from "./transcript.js";
import { Copy, Problems, Reward, isTyping, number, useKeys } from "./widgets.js";

export function Episode({ run, address }) {
  const [kind, step, groupId, episodeId] = address.parts;
  const { query } = address;
  const { value: group, error } = useDocument(`${run}/group/${kind}/${step}/${groupId}`);
  const { value: all } = useDocument(`${run}/episodes`);
  const { rows } = useMemo(() => chosen(all, query), [all, query.q, query.sort]);
  const at = all ? rows.findIndex((row) => all.columns.episode_id[row] === episodeId && all.columns.step[row] === Number(step) && kindOf(all.columns, row) === kind) : -1;
  const near = (offset) => (at >= 0 && rows[at + offset] !== undefined ? episodeLink(run, all.columns, rows[at + offset], query, { show: query.show, colour: query.colour }) : null);
  const here = (changes, id = episodeId) => link(run, "episode", [kind, step, groupId, id], { ...query, ...changes });

  useKeys((event) => {
    if (isTyping(event)) return;
    const member = group?.episodes.findIndex((one) => one.row.episode_id === episodeId) ?? -1;
    const sibling = (offset) => group?.episodes[member + offset] && here({}, group.episodes[member + offset].row.episode_id);
    const goal = { j: near(1), k: near(-1), ArrowRight: sibling(1), ArrowLeft: sibling(-1), t: here({ show: query.show === "tokens" ? "" : "tokens" }), g: link(run, "group", [kind, step, groupId]), Escape: link(run, "episodes", [], { q: query.q, sort: query.sort }) }[event.key];
    if (!goal) return;
    event.preventDefault();
    location.hash = goal;
  });

  if (error) return html`<${Problems} items=${[error.message]} />`;
  if (!group) return html`<p class="soft">Loading …</p>`;
  const episode = group.episodes.find((one) => one.row.episode_id === episodeId);
  if (!episode) return html`<${Problems} items=${[`Group ${groupId} of step ${step} has no episode ${episodeId}.`]} />`;
  const { row } = episode;
  const showTokens = query.show === "tokens";
  return html`<div class="bar crumbs">
      <a href=${link(run, "episodes", [], { q: query.q, sort: query.sort })}>← episodes</a>
      <a href=${link(run, "episodes", [], { q: asFilter(kind, step) })}>${kind === "train" ? "step" : "held out, version"} ${step}</a>
      <a href=${link(run, "group", [kind, step, groupId])}>group ${groupId}</a>
      <span class="grow"></span>
      ${at >= 0 && html`<span class="soft">${(at + 1).toLocaleString("en")} of ${rows.length.toLocaleString("en")}</span>`}
      <a class="button" href=${near(-1)} aria-disabled=${!near(-1)} title="k">previous</a>
      <a class="button" href=${near(1)} aria-disabled=${!near(1)} title="j">next</a>
    </div>
    <div class="bar">
      <h1>${row.episode_id}</h1>
      <${Reward} value=${row.reward} correct=${row.correct} />
      <${Facts} row=${row} />
    </div>
    <div class="bar siblings" aria-label="Episodes of this group">
      <span class="soft">siblings</span>
      ${group.episodes.map((one) => html`<a key=${one.row.episode_id} href=${here({}, one.row.episode_id)} aria-current=${one === episode ? "true" : undefined}><${Reward} value=${one.row.reward} correct=${one.row.correct} /></a>`)}
    </div>
    <div class="bar tabs">
      <a href=${here({ show: "" })} aria-current=${showTokens ? undefined : "page"}>transcript</a>
      <a href=${here({ show: "tokens" })} aria-current=${showTokens ? "page" : undefined}>tokens</a>
      <a href=${link(run, "group", [kind, step, groupId])}>side by side</a>
      <span class="grow"></span>
      <${Copy} get=${() => ({ task: group.task, ...episode })} />
    </div>
    ${showTokens ? html`<${Tokens} episode=${episode} group=${group} colour=${query.colour} setColour=${(colour) => (location.hash = here({ colour }))} />` : html`<${Transcript} episode=${episode} task=${group.task} />`}
    <p class="soft keys"><kbd>j</kbd> <kbd>k</kbd>: next, previous · <kbd>←</kbd> <kbd>→</kbd>: siblings · <kbd>t</kbd>: tokens · <kbd>g</kbd>: side by side · <kbd>Esc</kbd>: back</p>`;
}

function Facts({ row }) {
  const parts = Object.entries(row).filter(([name]) => name.startsWith("rewards/"));
  const facts = [
    ["ended", row.stop_reason],
    ["turns", row.turns],
    ["tokens", row.tokens],
    ["tool calls", row.tool_calls && `${row.tool_calls}${row.tool_errors ? `, ${row.tool_errors} failed` : ""}`],
    ["version", row.oldest_version === null ? "not recorded" : row.oldest_version === row.newest_version ? row.oldest_version : `${row.oldest_version} to ${row.newest_version}`],
    ["lag", row.lag ?? false],
    ["above the mean", row.above_mean && `${row.above_mean > 0 ? "+" : ""}${number(row.above_mean)}`],
    ["weight", row.weight !== 1 && row.weight],
    ["seconds", row.wall_s],
    ["retries", row["info/retries"]],
    ...(parts.length > 1 ? parts.map(([name, value]) => [name.replace("rewards/", ""), value]) : []),
  ];
  return html`<dl class="facts">${facts.filter(([name, value]) => (value || (value === 0 && ["version", "lag"].includes(name)))).map(([name, value]) => html`<div><dt>${name}</dt><dd>${typeof value === "number" ? number(value) : value}</dd></div>`)}</dl>`;
}
