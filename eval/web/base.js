"use strict";
// What every part of the page uses: its data, elements, numbers, names and state. Texts of the data
// enter the document as text nodes and attribute values only, never as markup.

const { result, names, curves, chunks, questions } =
  JSON.parse(document.getElementById("data").textContent);
const cells = result.results;
const datasets = Object.keys(result.questions_by_dataset);

// Elements: html("td.text", {title: "…", click: listener}, child, …); children may be lists, and
// nothing comes of a child or an attribute that is null, undefined or false.
const builder = (namespace) => (name, ...rest) => {
  const [tag, ...classes] = name.split(".");
  const node = document.createElementNS(namespace, tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  const isAbsent = (value) => value == null || value === false;
  if (rest[0]?.constructor === Object) {
    for (const [key, value] of Object.entries(rest.shift())) {
      if (typeof value === "function") node.addEventListener(key, value);
      else if (!isAbsent(value)) node.setAttribute(key, value);
    }
  }
  node.append(...rest.flat().filter((child) => !isAbsent(child)));
  return node;
};
const html = builder("http://www.w3.org/1999/xhtml");
const svg = builder("http://www.w3.org/2000/svg");
const byId = (id) => document.getElementById(id);

// Draws anew and gives the focus back to the element that had it, by its id.
function redraw(draw) {
  const { id } = document.activeElement ?? {};
  draw();
  if (id) byId(id)?.focus({ preventScroll: true });
}

// Numbers. What is not known is a dash.
const number = (digits) => (value) => value?.toFixed(digits).replace("-", "−") ?? "–";
const signed = (value) => (value > 0 ? "+" : "") + number(1)(value);
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(0)} %`);
const ms = (value) => number(value < 100 ? 1 : 0)(value);
const interval = (low, high, show = number(1)) => `[${show(low)}, ${show(high)}]`;

// Names. An empty arm is the recipe without changes.
const systemName = (row) => names.systems[row.system].name;
const weights = (row) => names.checkpoints[row.checkpoint];
const width = (row) => `${row.k_c}/${row.k ?? "all"}`;
const cellName = (row) =>
  [`${systemName(row)} ${width(row)}`, weights(row), row.arm].filter(Boolean).join(", ");
const cellKey = (row) =>
  [row.system, row.checkpoint, row.k_c, row.k ?? "all", row.arm].filter(Boolean).join(".");
const kindNames = (kinds) => kinds.map((kind) => names.errors[kind]).join(", ");

// What is looked at, kept in the address's fragment so that it can be linked to. `q` is the id of
// a question, `hide` lists systems (or "arms") that the plots leave out, the others are filters.
const PLAIN = { q: "", cell: "", text: "", data: "", show: "", kind: "", hide: "" };
const state = { ...PLAIN };

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(PLAIN)) state[name] = given.get(name) ?? PLAIN[name];
}

function writeAddress() {
  const told = Object.entries(state).filter(([name, value]) => value !== PLAIN[name]);
  history.replaceState(null, "", `#${new URLSearchParams(told)}`);
}
