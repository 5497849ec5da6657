// Documents of the page, by name, from where the page was opened: a server, files beside it, or the page itself.
// Each is JSON; files and the page hold it gzipped in base64. Knows no view.

const cache = new Map();
const listeners = new Set();
const arrivals = new Map();

export const source = document.querySelector('meta[name="agentrl-source"]')?.content ?? "page";

/** The document, from the cache where it is there. Throws an Error that says what is missing. */
export function load(name) {
  if (!cache.has(name)) {
    const promise = { server: fromServer, files: fromFile, page: fromPage }[source](name);
    cache.set(name, promise);
    promise.catch(() => cache.delete(name));
  }
  return cache.get(name);
}

/** Calls `listener(names)` when documents changed at the server; returns a function that stops it. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Forget documents of a run and tell the views, which load them again. */
function changed(run) {
  for (const name of [...cache.keys()]) {
    if (name === "runs" || name.startsWith(`${run}/`)) cache.delete(name);
  }
  for (const listener of listeners) listener(run);
}

async function fromServer(name) {
  const response = await fetch(`doc/${name.split("/").map(encodeURIComponent).join("/")}`);
  if (!response.ok) throw new Error((await response.text()).slice(0, 500) || `the server answered ${response.status}`);
  return response.json();
}

/** A script element works from a folder too, where fetch does not. */
function fromFile(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    arrivals.set(name, resolve);
    script.src = `data/${fileName(name)}`;
    script.onerror = () => reject(new Error(`data/${fileName(name)} is not in this folder`));
    script.onload = () => script.remove();
    document.head.append(script);
  }).then(unpacked);
}

export function fileName(name) {
  return `${name.replace(/[^A-Za-z0-9._/-]/g, (sign) => `_${sign.codePointAt(0).toString(16)}_`)}.js`;
}

globalThis.agentrlData = (name, text) => arrivals.get(name)?.(text);

async function fromPage(name) {
  const element = [...document.querySelectorAll("script[data-doc]")].find((one) => one.dataset.doc === name);
  if (!element) throw new Error("this page holds a sample of the run; `agentrl view` shows all of it");
  return unpacked(element.textContent);
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

if (source === "server") {
  new EventSource("events").addEventListener("changed", (event) => changed(JSON.parse(event.data).run));
}
