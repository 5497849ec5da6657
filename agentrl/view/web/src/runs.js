// The runs that are open, to choose one, and to compare them.

import { html } from "htm/preact";
import { Compare } from "./compare.js";
import { link } from "./route.js";
import { duration, number } from "./widgets.js";

export function Runs({ runs }) {
  return html`<h1>Runs</h1>
    <div class="scroll"><table>
      <thead><tr><th scope="col">run</th><th scope="col">state</th><th scope="col">steps</th><th scope="col">held out</th><th scope="col">time</th><th scope="col">environment</th><th scope="col">model</th></tr></thead>
      <tbody>
        ${runs.map(
          (run) => html`<tr>
            <td><a href=${link(run.key, "overview")}>${run.run}</a></td>
            <td><span class="state state-${run.state}" title=${run.sentence}><i></i>${run.state}</span></td>
            <td class="num">${run.steps}${run.num_steps ? ` / ${run.num_steps}` : ""}</td>
            <td class="num">${run.eval_first === null ? "–" : `${number(run.eval_first)} → ${number(run.eval_last)}`}</td>
            <td class="num">${run.started_s ? duration(run.ended_s - run.started_s) : "–"}</td>
            <td>${run.env}</td><td>${run.model}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${runs.length > 1 && html`<${Compare} runs=${runs} />`}`;
}
