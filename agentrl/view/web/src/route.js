// Where the page is: #/RUN/VIEW/PART/PART?name=value. Every view can be linked to.

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [run = "", view = "overview", ...parts] = path.split("/").map(decoded);
  return { run, view: view || "overview", parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(run, view, parts = [], query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(kept).toString();
  return `#/${[run, view, ...parts].map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

/** The kind of an episode as addresses name it: train, eval, or eval-SET. */
export function kindOf(columns, row) {
  const set = columns.eval_set?.[row];
  return set ? `${columns.kind[row]}-${set}` : columns.kind[row];
}

/** The filter for the episodes of such a kind and a step. */
export function asFilter(kind, step) {
  const [name, set] = kind.split(/-(.*)/s);
  return `kind=${name}${set ? ` eval_set=${set}` : ""} step=${step}`;
}

/** Change the address without a new entry in the history. */
export function replace(hash) {
  history.replaceState(null, "", hash);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
