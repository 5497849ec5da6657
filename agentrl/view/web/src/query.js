// The language of the filter line, which is that of `agentrl view --json`: `reward<1 stop_reason=max_turns lag>=1 words`.
// A word that is no condition must be in the episode's texts. Conditions and words are joined by "and".

const CONDITION = /^([^=!<>~\s"]+)(!=|<=|>=|=|<|>|~)(.*)$/s;
const TEXTS = ["task_id", "episode_id", "prompt", "final", "answer"];

/** The parts of a line; quotes keep blanks together. */
export function parse(text) {
  const parts = text.match(/(?:[^\s"]|"[^"]*")+/g) ?? [];
  return parts.map((part) => {
    const bare = part.replaceAll('"', "");
    const [, column, sign, value] = bare.match(CONDITION) ?? [];
    return column ? { column, sign, value } : { word: bare.toLowerCase() };
  });
}

export function format(parts) {
  const quoted = (text) => (/\s/.test(text) ? `"${text}"` : text);
  return parts.map((one) => quoted(one.word ?? `${one.column}${one.sign}${one.value}`)).join(" ");
}

/** The same line with the conditions on `column` replaced by `conditions`. */
export function withConditions(text, column, conditions) {
  const kept = parse(text).filter((one) => one.column !== column);
  return format([...kept, ...conditions.map((one) => ({ column, ...one }))]);
}

const selected = new WeakMap(); // columns -> what was asked last: the table and most facets ask the same
const haystacks = new WeakMap(); // columns -> the texts of each row, in small letters

/** Indices of the rows that pass. `columns`: name -> values. Unknown columns are collected in `unknown`. */
export function select(columns, count, text, unknown = []) {
  const parts = parse(text);
  const key = `${count} ${format(parts)}`;
  if (!selected.has(columns)) selected.set(columns, new Map());
  const known = selected.get(columns);
  if (!known.has(key)) {
    const missing = [];
    const tests = parts.map((part) => test(columns, part, missing)).filter(Boolean);
    const rows = [];
    for (let row = 0; row < count; row++) {
      if (tests.every((passes) => passes(row))) rows.push(row);
    }
    if (known.size >= 20) known.clear();
    known.set(key, { rows, missing });
  }
  unknown.push(...known.get(key).missing);
  return known.get(key).rows;
}

function haystack(columns) {
  if (!haystacks.has(columns)) {
    const texts = TEXTS.map((name) => columns[name]).filter(Boolean);
    haystacks.set(columns, (texts[0] ?? []).map((_, row) => texts.map((values) => values[row] ?? "").join("\n").toLowerCase()));
  }
  return haystacks.get(columns);
}

function test(columns, { word, column, sign, value }, unknown) {
  if (word !== undefined) {
    const texts = haystack(columns);
    return (row) => texts[row].includes(word);
  }
  const values = columns[column];
  if (!values) {
    unknown.push(column);
    return null;
  }
  const number = Number(value);
  const lower = value.toLowerCase();
  const isEqual = (found) => {
    if (found === null || found === undefined) return lower === "null";
    if (typeof found === "number") return value !== "" && found === number;
    return typeof found === "boolean" ? String(found) === lower : String(found) === value;
  };
  const compare = {
    "=": isEqual,
    "!=": (found) => !isEqual(found),
    "~": (found) => found !== null && found !== undefined && String(found).toLowerCase().includes(lower),
    "<": (found) => typeof found === "number" && found < number,
    "<=": (found) => typeof found === "number" && found <= number,
    ">": (found) => typeof found === "number" && found > number,
    ">=": (found) => typeof found === "number" && found >= number,
  }[sign];
  return (row) => compare(values[row]);
}

/** Sort indices by a column; rows without a value come last. */
export function order(columns, rows, sort) {
  const name = sort.replace(/^-/, "");
  const values = columns[name];
  if (!values) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const has = rows.filter((row) => values[row] !== null && values[row] !== undefined);
  const without = rows.filter((row) => values[row] === null || values[row] === undefined);
  const less = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  return [...has.sort((a, b) => sign * less(values[a], values[b]) || a - b), ...without];
}
