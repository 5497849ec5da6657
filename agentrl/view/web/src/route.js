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
