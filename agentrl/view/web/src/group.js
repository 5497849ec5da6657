// The episodes of one task beside each other: who was pushed up or down, and where two of them part.

import { html } from "htm/preact";
import { useDocument } from "./main.js";
import { asFilter, link, replace } from "./route.js";
import { Message } from "./transcript.js";
import { Text, visible } from "./text.js";
import { Problems, Push, Reward, number, percent } from "./widgets.js";

export function Group({ run, address, summary }) {
  const [kind, step, groupId] = address.parts;
  const { value: group, error } = useDocument(`${run}/group/${kind}/${step}/${groupId}`);
  if (error) return html`<${Problems} items=${[error.message]} />`;
  if (!group) return html`<p class="soft">Loading …</p>`;
  const { episodes, task } = group;
  const rewards = episodes.map((one) => one.row.reward);
  const best = rewards.indexOf(Math.max(...rewards));
  const worst = rewards.indexOf(Math.min(...rewards));
  const pick = (name, other) => Math.min(episodes.length - 1, Number(address.query[name] ?? other) || 0);
  const [left, right] = [pick("a", best), pick("b", worst === best ? Math.min(best + 1, episodes.length - 1) : worst)];
  const choose = (name, place) => replace(link(run, "group", address.parts, { ...address.query, a: left, b: right, [name]: place }));
  return html`<div class="bar crumbs">
      <a href=${link(run, "episodes", [], { q: asFilter(kind, step) })}>← ${kind === "train" ? "step" : "held out, version"} ${step}</a>
      <a href=${link(run, "episodes", [], { q: `task_id=${task.id}` })}>every episode of this task</a>
    </div>
    <h1 class="below">Group ${groupId} <span class="soft">${task.id}</span></h1>
    <div class="panel"><${Text} text=${task.prompt} />${task.answer !== null && html`<p class="gold"><span class="soft">gold answer</span> <b>${visible(task.answer)}</b></p>`}</div>
    <${Members} ...${{ run, kind, step, groupId, group, left, right, choose, baseline: summary?.config.algorithm?.baseline }} />
    <h2>Side by side</h2>
    <${Pair} a=${episodes[left]} b=${episodes[right]} />`;
}

function Members({ run, kind, step, groupId, group, left, right, choose, baseline }) {
  const rows = group.episodes.map((one) => one.row);
  const mean = rows.reduce((sum, row) => sum + row.reward, 0) / rows.length;
  const notes = group.episodes.map(learnerOf);
  const why = notes.every(Boolean) ? notes : null;
  const pushes = rows.map((row, place) => (why ? why[place].push : row.above_mean * row.weight));
  const most = Math.max(...pushes.map(Math.abs));
  const parts = Object.keys(rows[0]).filter((name) => name.startsWith("rewards/") && rows.length);
  return html`<p class="soft">
      Mean reward ${number(mean)}. ${why ? explained(why, mean, baseline) : most === 0 ? "All rewards are equal: with a baseline the group has no gradient." : "Bars show the reward against the mean of the group, times the share."}
      ${!why && kind === "train" && most > 0 && baseline && ` The learner subtracted the baseline ${baseline}, and weighed each episode; this run's files do not say what came out (metrics.annotate).`}
    </p>
    <div class="scroll"><table class="members">
      <thead><tr>
        <th scope="col">A</th><th scope="col">B</th><th scope="col">episode</th><th scope="col">reward</th>
        ${parts.length > 1 && parts.map((name) => html`<th scope="col">${name.replace("rewards/", "")}</th>`)}
        <th scope="col" title="reward minus the mean of the group">reward − mean</th>
        ${why && WHY.map(([title, about]) => html`<th scope="col" title=${about}>${title}</th>`)}
        <th scope="col">down · up</th>
        <th scope="col" title="share in the gradient, by the rollout's rules">share</th><th scope="col">lag</th><th scope="col">turns</th><th scope="col">tokens</th><th scope="col">ended</th><th scope="col">last text</th>
      </tr></thead>
      <tbody>
        ${rows.map(
          (row, place) => html`<tr>
            <td><input type="radio" name="a" aria-label=${`${row.episode_id} on the left`} checked=${place === left} onChange=${() => choose("a", place)} /></td>
            <td><input type="radio" name="b" aria-label=${`${row.episode_id} on the right`} checked=${place === right} onChange=${() => choose("b", place)} /></td>
            <td><a href=${link(run, "episode", [kind, step, groupId, row.episode_id])}>${row.episode_id}</a></td>
            <td><${Reward} value=${row.reward} correct=${row.correct} /></td>
            ${parts.length > 1 && parts.map((name) => html`<td class="num">${number(row[name])}</td>`)}
            <td class="num">${row.above_mean > 0 ? "+" : ""}${number(row.above_mean)}</td>
            ${why && WHY.map(([, , value]) => html`<td class="num">${value(why[place])}</td>`)}
            <td><${Push} value=${pushes[place]} max=${most} /></td>
            <td class="num">${number(row.weight)}</td><td class="num">${number(row.lag)}</td><td class="num">${row.turns}</td><td class="num">${row.tokens}</td>
            <td class=${row.stop_reason === "completed" ? "" : "middle"}>${row.stop_reason}</td>
            <td class="clip" title=${row.final}>${visible(row.final)}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>`;
}

const WHY = [
  ["advantage", "reward minus the baseline of the learner, divided by the deviation if so set", (one) => number(one.advantage)],
  ["weight w", "importance weight in use: of the learner over the policy that sampled", (one) => one.weights.map(number).join(", ")],
  ["score norm", "size of the gradient of its log-probability, without weight and advantage", (one) => one.norms.map(number).join(", ")],
  ["share in b*", "w² n² over the sum of the group: how much its reward counts in the optimal baseline", (one) => (one.share === null ? "–" : percent(one.share))],
];

/** The learner's numbers of an episode; null where one of its segments has none. */
function learnerOf({ segments }) {
  const notes = segments.map((segment) => segment.learner);
  if (!notes.length || !notes.every(Boolean)) return null;
  const [{ advantage, baseline_share: share, baseline_minus_mean: shift, is_refused }] = notes;
  const pushes = notes.map((one) => (is_refused ? 0 : (one.weight ?? 0) * (one.advantage ?? 0) * (one.score_norm ?? 1)));
  const push = pushes.reduce((sum, one) => sum + one, 0);
  return { push, advantage, share, shift, is_refused, weights: notes.map((one) => one.weight), norms: notes.map((one) => one.score_norm) };
}

function explained([{ shift, is_refused }], mean, baseline) {
  if (is_refused) return "The learner refused this step: nothing was pushed.";
  if (shift === null) return "The group has no gradient.";
  const bars = "Bars show weight × advantage × score norm: how hard the step pushed the episode, to the right to make it more likely.";
  if (baseline === "otb") return `The learner subtracted a baseline of each token (otb); advantages are means over tokens. ${bars}`;
  const against = Math.abs(shift) < 1e-9 ? "the mean" : `${number(Math.abs(shift))} ${shift > 0 ? "above" : "below"} the mean`;
  const what = String(baseline).includes("leave_one_out") ? "baselines of each episode, on average" : "the baseline";
  return `The learner subtracted ${what} ${number(mean + shift)} (${baseline}), ${against}. ${bars}`;
}

/** Two episodes, message by message; the first that differs is marked. */
function Pair({ a, b }) {
  const sides = [a, b].map((one) => one.segments.flatMap((segment) => segment.messages));
  const length = Math.max(...sides.map((side) => side.length));
  const texts = sides.map((side) => side.map((message) => JSON.stringify([message.role, message.content, message.tool_calls.map((call) => [call.name, call.arguments])])));
  const first = Array.from({ length }, (_, place) => place).find((place) => texts[0][place] !== texts[1][place]);
  const same = first ?? length;
  return html`<div class="pair" aria-label="Two episodes">
    <div class="pair-head">${[a, b].map((one, place) => html`<div><b>${"AB"[place]}</b> ${one.row.episode_id} <${Reward} value=${one.row.reward} correct=${one.row.correct} /> <span class="soft">${one.row.stop_reason}</span></div>`)}</div>
    ${same > 0 && html`<details class="same"><summary>${same === length ? "They are the same" : `The first ${same === 1 ? "message is" : `${same} messages are`} the same`}</summary>${sides[0].slice(0, same).map((message) => html`<${Message} message=${message} turn=${-1} />`)}</details>`}
    ${Array.from({ length: length - same }, (_, offset) => same + offset).map(
      (place) => html`<div class=${`pair-row ${place === first ? "first" : ""}`}>
        ${place === first && html`<div class="mark">first difference</div>`}
        ${sides.map((side) => (side[place] ? html`<${Message} message=${side[place]} turn=${-1} />` : html`<div class="soft none">–</div>`))}
      </div>`,
    )}
  </div>`;
}
