// The page: header, navigation, and the view that the address names.

import { html, render } from "htm/preact";
import { useEffect, useState } from "preact/hooks";
import { load, onChange, source } from "./store.js";
import { link, parse } from "./route.js";
import { Overview } from "./overview.js";
import { Episodes } from "./episodes.js";
import { Group } from "./group.js";
import { Episode } from "./episode.js";
import { Ledger } from "./ledger.js";
import { Runs } from "./runs.js";
import { Timeline } from "./timeline.js";
import { Settings } from "./settings.js";
import { Problems } from "./widgets.js";

const VIEWS = { overview: Overview, episodes: Episodes, timeline: Timeline, ledger: Ledger, settings: Settings };
const DETAILS = { group: Group, episode: Episode };
const THEMES = ["auto", "light", "dark"];

function useAddress() {
  const [address, setAddress] = useState(() => parse(location.hash));
  useEffect(() => {
    const read = () => setAddress(parse(location.hash));
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return address;
}

/** The document once it is there; again whenever its run changes. */
export function useDocument(name) {
  const [state, setState] = useState({ name: null });
  useEffect(() => {
    let current = true;
    const get = () =>
      name &&
      load(name).then(
        (value) => current && setState({ name, value }),
        (error) => current && setState({ name, error }),
      );
    get();
    const stop = onChange((run) => name && (name === "runs" || name.startsWith(`${run}/`)) && get());
    return () => {
      current = false;
      stop();
    };
  }, [name]);
  return state.name === name ? state : {};
}

function useTheme() {
  const [theme, setTheme] = useState(() => readTheme());
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("agentrl-theme", theme);
    } catch {
      // A page from a file may have no storage.
    }
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function readTheme() {
  try {
    return THEMES.includes(localStorage.getItem("agentrl-theme")) ? localStorage.getItem("agentrl-theme") : "auto";
  } catch {
    return "auto";
  }
}

function App() {
  const address = useAddress();
  const runs = useDocument("runs");
  const [theme, nextTheme] = useTheme();
  const list = runs.value?.runs ?? [];
  const run = list.find((one) => one.key === address.run) ?? (address.run ? null : list.length === 1 ? list[0] : null);
  const key = run?.key ?? "";
  const summary = useDocument(key ? `${key}/summary` : null);
  const View = VIEWS[address.view] ?? DETAILS[address.view];
  useEffect(() => {
    document.title = run ? `${run.run} · ${address.view} · agentrl` : "agentrl";
  }, [run?.run, address.view]);

  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <a class="brand" href=${list.length > 1 ? "#/" : link(key, "overview")}><b>agentrl</b></a>
      ${run && html`<span class="run-name">${run.run}</span><${State} run=${summary.value?.row ?? run} />`}
      <nav aria-label="Views">${
        run &&
        Object.keys(VIEWS).map(
          (name) =>
            html`<a
              href=${link(key, name)}
              aria-current=${isHere(name, address.view) ? "page" : undefined}
              >${name}</a
            >`,
        )
      }</nav>
      <button class="quiet" onClick=${nextTheme} title="Colours: ${theme}" aria-label="Colours: ${theme}">
        ${{ auto: "◐", light: "☀", dark: "☾" }[theme]}
      </button>
    </header>
    <main id="main" tabindex="-1">
      ${runs.error && html`<${Problems} items=${[`The runs cannot be loaded: ${runs.error.message}`]} />`}
      ${summary.error && html`<${Problems} items=${[`The run cannot be loaded: ${summary.error.message}`]} />`}
      ${
        run
          ? View
            ? html`<${Problems} items=${summary.value?.problems ?? []} /><${View}
                  run=${key}
                  address=${address}
                  summary=${summary.value}
                />`
            : html`<${Problems} items=${[`There is no view "${address.view}" on this page.`]} />`
          : address.run && runs.value
            ? html`<${Problems} items=${[`There is no run "${address.run}" here.`]} /><${Runs} runs=${list} />`
            : runs.value
              ? html`<${Runs} runs=${list} />`
              : !runs.error && html`<p class="soft">Loading …</p>`
      }
    </main>
    <footer class="soft">
      ${{ server: "live from the run folder", files: "a copy of the run", page: "a sample of the run, in one file" }[source]}
    </footer>`;
}

function isHere(name, view) {
  return name === view || (name === "episodes" && view in DETAILS);
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function State({ run }) {
  return html`<span class="state state-${run.state}" title=${run.sentence}><i></i>${run.state}</span>`;
}

render(html`<${App} />`, document.getElementById("app"));
