// The browser of questions: filters, a list, and a question with what a cell's model saw of it.

const filters = byId("filters").elements;
const PAGE = 30;
let listed = PAGE;

function chosenCell() {
  const named = cells.findIndex((row) => cellKey(row) === state.cell);
  const usual = { system: "coinrag", checkpoint: "fine_tuned", arm: "" };
  const isUsual = (row) => Object.keys(usual).every((name) => row[name] === usual[name]);
  return named >= 0 ? named : Math.max(0, cells.findIndex(isUsual));
}

// What a cell answered; null where it was not asked.
function answerOf(question, cell) {
  if (!question.answers[cell]) return null;
  const [answer, f1, ttft, kinds, context] = question.answers[cell];
  const [retrieved, evidence] = question.contexts[context];
  return { answer, f1, ttft, kinds, retrieved, evidence, right: f1 === 1 };
}

function matches(question, cell) {
  const given = answerOf(question, cell);
  if (!given || (state.data && question.dataset !== state.data)) return false;
  if (state.show && given.right !== (state.show === "right")) return false;
  if (state.kind === "none" && given.kinds.length) return false;
  if (state.kind in names.errors && !given.kinds.includes(state.kind)) return false;
  const searched = [question.id, question.question, ...question.gold, given.answer].join("\n");
  return searched.toLowerCase().includes(state.text.trim().toLowerCase());
}

const shownText = (text) => (text.trim() ? text : html("em", "(empty)"));
const score = ({ f1, right }) => html(right ? "span.score.right" : "span.score", `F1 ${number(0)(100 * f1)}`);

function drawBrowser() {
  const cell = chosenCell();
  const found = questions.filter((question) => matches(question, cell));
  const current = questions.find((question) => question.id === state.q) ?? found[0];
  listed = Math.max(listed, found.indexOf(current) + 1);
  const choose = (question) => {
    state.q = question.id;
    redraw(update);
    // On a narrow screen the question stands below the list.
    if (matchMedia("(max-width: 800px)").matches) byId("question").scrollIntoView();
  };
  const item = (question) => {
    const given = answerOf(question, cell);
    const about = [question.dataset, kindNames(given.kinds)].filter(Boolean).join(" · ");
    return html("li", html("button", {
      id: `item-${question.id}`, type: "button", click: () => choose(question),
      "aria-current": question === current && "true",
    }, html("span", { dir: "auto" }, question.question), html("small", score(given), ` ${about}`)));
  };
  const more = () => {
    listed += PAGE;
    redraw(drawBrowser);
  };
  const button = html("li", html("button", { id: "more", type: "button", click: more }, "Show more"));
  byId("count").replaceChildren(`${found.length} of ${questions.length} questions`);
  byId("list").replaceChildren(...found.slice(0, listed).map(item), found.length > listed ? button : "");
  byId("question").replaceChildren(...(current ? questionView(current, cell, found, choose) : []));
}

function questionView(question, cell, found, choose) {
  const place = found.indexOf(question);
  const given = answerOf(question, cell);
  const turn = (id, text, to) =>
    html("button", { id, type: "button", disabled: !to && "", click: () => choose(to) }, text);
  return [
    html("div.turn", turn("previous", "← Previous", found[place - 1]),
      html("span", place < 0 ? "not among those found" : `${place + 1} of ${found.length}`),
      turn("next", "Next →", found[place + 1])),
    html("h3", { dir: "auto" }, question.question),
    html("p.quiet", `${question.dataset} · ${question.id}`),
    html("dl", html("dt", "Gold answers"),
      html("dd", question.gold.map((gold) => html("span.chip", { dir: "auto" }, gold))),
      html("dt", cellName(cells[cell])),
      html("dd.answer", { dir: "auto" }, given ? shownText(given.answer) : "was not asked this question"),
      given && [html("dt", "Judged"), html("dd", score(given), ` ${kindNames(given.kinds)}`)]),
    ...(given ? contextView(question, given) : []),
    html("h4", "Every cell's answer"),
    answersTable(question, cell),
  ];
}

function answersTable(question, cell) {
  const rows = cells.map((row, place) => ({ ...row, ...answerOf(question, place), place }));
  const look = (row) => {
    state.cell = cellKey(row);
    redraw(update);
  };
  const view = (row) =>
    html("button", { id: `cell-${row.place}`, type: "button", click: () => look(row) }, cellName(row));
  return sortable("Every cell's answer", [
    { head: "Cell", value: cellName, show: view, kind: "text.long" },
    { ...column("Answer", "answer", shownText), kind: "text.long" },
    column("F1", "f1", (f1) => number(0)(100 * f1)),
    { head: "Error kinds", value: (row) => kindNames(row.kinds), kind: "text" },
    column("TTFT, ms", "ttft", ms),
  ], rows.filter((row) => row.retrieved), (row) => row.place === cell);
}

// The retrieved chunks, in which the evidence that the cell's model saw is marked by its rank.
function contextView(question, given) {
  const pieces = given.evidence.map(([chunk, start, end], place) =>
    ({ chunk, start, end, rank: place + 1 }));
  const isStray = ({ chunk, start }) => typeof start === "string" || !given.retrieved.includes(chunk);
  const stray = pieces.filter(isStray);
  const textOf = ({ chunk, start, end }) =>
    (typeof start === "string" ? start : chunks[chunk][1].slice(start, end));
  const chunkView = (chunk, place) => {
    const [title, text] = chunks[chunk];
    const seen = pieces.filter((piece) => piece.chunk === chunk && !isStray(piece));
    const whole = seen.find((piece) => piece.start === undefined);
    const marks = [...seen.filter((piece) => piece !== whole), ...goldMarks(question.gold, text)];
    // A chunk's text mostly opens with its title, which need not be read twice.
    const opening = title && text.startsWith(`${title}\n`) ? title.length : 0;
    return html(whole ? "section.chunk.whole" : "section.chunk",
      html("h5", { dir: "auto" }, html("span.quiet", `${place + 1} `),
        opening ? marked(text, marks, 0, opening) : title,
        whole && html("span.badge", `seen whole, rank ${whole.rank}`)),
      html("p", { dir: "auto" }, marked(text, marks, opening && opening + 1, text.length)));
  };
  return [
    html("h4", "Retrieved chunks"),
    html("p.quiet", html("mark", html("sup", 1), "evidence"), " that the model saw, with its rank · ",
      html("b.gold", "gold answer"), " · framed: the whole chunk was seen"),
    ...given.retrieved.map(chunkView),
    ...(stray.length ? [html("h4", "Seen, but not verbatim in a retrieved chunk")] : []),
    html("ol.stray", stray.map((piece) => html("li", { value: piece.rank, dir: "auto" }, textOf(piece)))),
  ];
}

// Where gold answers stand in a text, in any case, as whole words where the script parts words.
function goldMarks(gold, text) {
  return gold.map((answer) => answer.trim()).filter(Boolean).flatMap((answer) => {
    const literal = answer.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
    const runsOn = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u.test(answer);
    const edges = runsOn ? literal : `(?<![\\p{L}\\p{N}])${literal}(?![\\p{L}\\p{N}])`;
    return [...text.matchAll(new RegExp(edges, "giu"))].map(({ index, 0: { length } }) =>
      ({ start: index, end: index + length }));
  });
}

// A part of a text as nodes, cut where any mark begins or ends, so that overlaps keep their ranks.
function marked(text, marks, from, to) {
  const bounds = [from, to, ...marks.flatMap(({ start, end }) => [start, end])];
  const cuts = [...new Set(bounds.filter((at) => at >= from && at <= to))].sort((a, b) => a - b);
  return cuts.slice(1).map((end, place) => {
    const start = cuts[place];
    const here = marks.filter((each) => each.start <= start && end <= each.end);
    const nuggets = here.filter((each) => each.rank);
    const piece = text.slice(start, end);
    const inner = here.length > nuggets.length ? html("b.gold", piece) : piece;
    if (!nuggets.length) return inner;
    const ranks = nuggets.map((each) => each.rank).join(", ");
    const begun = nuggets.filter((each) => each.start === start).map((each) => html("sup", each.rank));
    return html(nuggets.length > 1 ? "mark.twice" : "mark", { title: `rank ${ranks}` }, begun, inner);
  });
}

function fillFilters() {
  const choices = {
    cell: cells.map((row) => [cellKey(row), cellName(row)]),
    data: [["", "all"], ...datasets.map((name) => [name, name])],
    show: [["", "right and wrong"], ["right", "right (F1 100)"], ["wrong", "wrong"]],
    kind: [["", "any or none"], ...Object.entries(names.errors), ["none", "none"]],
  };
  for (const [name, pairs] of Object.entries(choices)) {
    filters[name].replaceChildren(...pairs.map(([value, text]) => html("option", { value }, text)));
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("input", ({ target }) => {
    state[target.name] = target.value;
    listed = PAGE;
    // A question that the filters leave out gives way; another cell's view of it is wanted.
    const current = questions.find((question) => question.id === state.q);
    if (target.name !== "cell" && current && !matches(current, chosenCell())) state.q = "";
    update();
  });
}

function showBrowser() {
  for (const name of ["text", "data", "show", "kind"]) filters[name].value = state[name];
  filters.cell.value = cellKey(cells[chosenCell()]);
  drawBrowser();
  const list = byId("list");
  const active = list.querySelector("[aria-current]");
  const below = active ? active.offsetTop + active.offsetHeight - list.clientHeight : 0;
  if (active && (active.offsetTop < list.scrollTop || below > list.scrollTop)) list.scrollTop = below;
}

function update() {
  showBrowser();
  writeAddress();
}
