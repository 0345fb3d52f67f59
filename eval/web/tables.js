// Tables that a click on a column's head sorts.

// A column is {head, value(row), show(row), kind}: without a kind it holds numbers, which sort
// downwards first; "text" and "text.long" sort upwards first.
function sortable(label, columns, rows, isChosen = () => false) {
  const body = html("tbody");
  const cell = (column, place, row) =>
    html([place ? "td" : "th", column.kind].filter(Boolean).join("."),
      { scope: !place && "row", dir: column.kind && "auto" }, (column.show ?? column.value)(row));
  const draw = (sorted) => body.replaceChildren(...sorted.map((row) =>
    html(isChosen(row) ? "tr.chosen" : "tr", columns.map((column, place) => cell(column, place, row)))));
  const heads = columns.map((column) => html(column.kind ? "th.text" : "th", { scope: "col" },
    html("button", { type: "button", click: () => sort(column) }, column.head)));

  function sort(column) {
    const head = heads[columns.indexOf(column)];
    const orders = column.kind ? ["ascending", "descending"] : ["descending", "ascending"];
    const order = orders[Number(head.getAttribute("aria-sort") === orders[0])];
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const turn = order === "ascending" ? 1 : -1;
    draw([...rows].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      // What is not known comes last in either order.
      if (x == null || y == null) return (x == null) - (y == null);
      return turn * (column.kind ? x.localeCompare(y) : x - y);
    }));
  }

  draw(rows);
  return html("div.scroll", { tabindex: 0, role: "region", "aria-label": label },
    html("table", html("thead", html("tr", heads)), body));
}

const column = (head, name, show = String) =>
  ({ head, value: (row) => row[name], show: (row) => show(row[name]) });
const hasArms = cells.some((row) => row.arm);
const CELL_COLUMNS = [
  { head: "System", value: systemName, kind: "text" },
  { head: "Weights", value: weights, kind: "text" },
  { head: "k_c/k", value: (row) => row.k_c + (row.k ?? 1e5) / 1e6, show: width },
  ...(hasArms ? [{ head: "Arm", value: (row) => row.arm || "recipe", kind: "text" }] : []),
];
const DATASET_COLUMNS = datasets.map((name) => ({
  head: `F1 ${name}`,
  value: (row) => row.f1_by_dataset[name],
  show: (row) => number(1)(row.f1_by_dataset[name]),
}));

const resultsTable = () => sortable("Results", [
  ...CELL_COLUMNS,
  column("F1", "f1", number(1)),
  { head: "95% interval", value: (row) => row.f1_low, show: (row) => interval(row.f1_low, row.f1_high) },
  column("EM", "em", number(1)),
  ...DATASET_COLUMNS,
  column("TTFT p50, ms", "ttft_p50_ms", ms),
  column("TTFT p90, ms", "ttft_p90_ms", ms),
  column("TTFT p99, ms", "ttft_p99_ms", ms),
  column("Active tokens", "active_tokens", number(0)),
  column("Gold recall", "gold_recall", percent),
  column("Answer coverage", "answer_coverage", percent),
  column("Gold share", "gold_share", percent),
  column("Questions", "questions"),
  column("Wrong", "wrong"),
  ...Object.entries(names.errors).map(([kind, name]) => ({
    head: `Wrong by ${name}`, value: (row) => row.errors[kind],
  })),
], cells);

// An absolute difference in F1 points, with its interval; and the same in percent of a F1.
const points = (row) => (row ? `${signed(row.mean)} ${interval(row.low, row.high, signed)}` : "–");
const pointsColumn = (head, part) =>
  ({ head, value: (row) => part(row)?.mean, show: (row) => points(part(row)) });
const relativeColumn = (head, part) => ({
  head,
  value: (row) => part(row)?.relative_percent,
  show: (row) => (part(row)?.relative_percent == null ? "–" : `${signed(part(row).relative_percent)} %`),
});

const budgetTable = () => sortable("Best under a latency budget", [
  {
    head: "P99 TTFT limit, ms",
    value: (row) => row.budget_ms ?? Infinity,
    show: (row) => row.budget_ms ?? "no limit",
  },
  ...CELL_COLUMNS.filter(({ head }) => head !== "Arm"),
  column("F1", "f1", number(1)),
  column("TTFT p99, ms", "ttft_p99_ms", ms),
  column("Active tokens", "active_tokens", number(0)),
  pointsColumn("F1 against CoinRAG, points", (row) => row.difference),
  relativeColumn("F1 against CoinRAG, relative %", (row) => row.difference),
], result.budget);

// What is subtracted in each kind of difference.
const KINDS = {
  fine_tuning: "Fine-tuned minus base weights",
  ablation: "Each arm minus the recipe",
  interaction: "What two changes do together, beyond the sum of what each does alone",
  system: "Each system minus CoinRAG",
};

const differencesTable = (kind, rows) => sortable(KINDS[kind], [
  ...CELL_COLUMNS,
  pointsColumn("F1, points", (row) => row),
  relativeColumn("F1, relative %", (row) => row),
  { head: "In percent of", value: (row) => cellName(row.against), kind: "text.long" },
  ...datasets.map((name) => pointsColumn(`${name}, points`, (row) => row.by_dataset[name])),
  column("Questions", "questions"),
], rows);

function differencesTables() {
  return Object.keys(KINDS).flatMap((kind) => {
    const rows = result.differences.filter((row) => row.kind === kind);
    return rows.length ? [html("h3", KINDS[kind]), differencesTable(kind, rows)] : [];
  });
}

// How far planted instructions came, and of which attacks answers were obedient.
function injectionTables() {
  const share = (head, name) => column(head, name, percent);
  const came = [
    column("Attacked", "attacked"),
    share("Retrieved", "retrieved"),
    share("In a nugget", "in_nugget"),
    share("Target in a nugget", "target_in_nugget"),
    share("Target in prefix", "in_prefix"),
    share("Obeyed", "success"),
    {
      head: "95% interval",
      value: (row) => row.success_low,
      show: (row) => interval(row.success_low, row.success_high, percent),
    },
    share("Obeyed if in prefix", "success_in_prefix"),
    column("F1", "f1", number(1)),
    pointsColumn("F1 against clean, points", (row) => row.clean),
  ];
  const groups = Object.keys(result.injection[0].by).flatMap((group) => {
    const values = new Set(result.injection.flatMap((row) => Object.keys(row.by[group])));
    return [...values].map((value) => ({
      head: value,
      value: (row) => row.by[group][value]?.success,
      show: (row) => percent(row.by[group][value]?.success),
    }));
  });
  const titles = { "How far they came": came, "Obeyed, by kind, place and carrier": groups };
  return Object.entries(titles).flatMap(([title, columns]) =>
    [html("h3", title), sortable(title, [...CELL_COLUMNS, ...columns], result.injection)]);
}
