// The resolved config of the run.

import { html } from "htm/preact";
import { Code } from "./text.js";
import { Copy } from "./widgets.js";

export function Settings({ summary }) {
  if (!summary) return html`<p class="soft">Loading …</p>`;
  return html`<div class="bar"><h1>Settings</h1><span class="grow"></span><${Copy} get=${() => summary.config} /></div>
    <div class="panel"><${Code} text=${JSON.stringify(summary.config, null, 2)} language="json" /></div>`;
}
