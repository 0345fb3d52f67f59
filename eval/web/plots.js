// Plots as SVG. Colour and form tell the system, filled or hollow the weights, size an arm.

const hidden = () => new Set(state.hide.split(" ").filter(Boolean));
const isShown = (row) => !hidden().has(row.system) && !(row.arm && hidden().has("arms"));

// The style sheet may give a system another colour, for a dark ground.
function coloured(node, row) {
  node.style.setProperty("--series", `var(--${row.system}, ${names.systems[row.system].colour})`);
  return node;
}

// Matplotlib's markers as corners, turn in degrees and, of stars, the inner radius.
const FORMS = {
  D: [4, 0], s: [4, 45], "^": [3, 0], v: [3, 180], "<": [3, 270], ">": [3, 90], o: [24, 0],
  P: [4, 0, 0.4], X: [4, 45, 0.4],
};

function mark(row, x, y) {
  const [corners, turn, inner = 1] = FORMS[names.systems[row.system].marker];
  const count = inner < 1 ? 2 * corners : corners;
  const corner = (_, place) => {
    const angle = ((turn - 90) / 180 + (2 * place) / count) * Math.PI;
    const radius = (row.arm ? 4.5 : 7) * (place % 2 ? inner : 1);
    return `${(x + radius * Math.cos(angle)).toFixed(1)},${(y + radius * Math.sin(angle)).toFixed(1)}`;
  };
  const outline = Array.from({ length: count }, corner).join(" ");
  return svg(`polygon.mark.${row.checkpoint}`, { points: outline });
}

const line = (row, d, extra = "") => coloured(svg(`path.line.${row.checkpoint}${extra}`, { d }), row);

function groups(rows, key) {
  const found = new Map();
  for (const row of rows) found.set(key(row), [...(found.get(key(row)) ?? []), row]);
  return [...found.values()];
}

function scale({ low, high, log }, from, to) {
  const at = log ? Math.log : Number;
  return (value) => from + ((at(value) - at(low)) / (at(high) - at(low))) * (to - from);
}

function ticks({ low, high, log }) {
  const power = Math.floor(Math.log10(log ? low : (high - low) / 5));
  const step = 10 ** power * [1, 2, 5, 10].find((digit) => digit * 10 ** power >= (high - low) / 5);
  const found = log
    ? Array.from({ length: 30 }, (_, place) => [1, 2, 5][place % 3] * 10 ** (power + ((place / 3) | 0)))
    : Array.from({ length: 12 }, (_, place) => (Math.ceil(low / step) + place) * step);
  return found.filter((tick) => tick >= low && tick <= high).map((tick) => Number(tick.toPrecision(6)));
}

// A drawing with axes {label, low, high, log}, y optional; returns it with its scales and box.
function axes(figure, title, height, x, y) {
  const wide = Math.max(figure.clientWidth, 240);
  const box = { left: y ? 46 : 12, right: wide - 12, top: 12, bottom: height - 42 };
  const middle = { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2 };
  const sx = scale(x, box.left, box.right);
  const drawing = svg("svg", { width: wide, height, role: "group", "aria-label": title });
  const label = (text, x, y, anchor, extra) =>
    drawing.append(svg("text", { x, y, "text-anchor": anchor, ...extra }, text));
  ticks(x).forEach((tick, place) => {
    drawing.append(svg("path.grid", { d: `M${sx(tick)},${box.top}V${box.bottom}` }));
    // Narrow drawings have no room for every number of a logarithmic axis.
    if (x.log && wide < 420 && place % 2) return;
    label(String(tick).replace("-", "−"), sx(tick), box.bottom + 16, "middle");
  });
  label(x.label, middle.x, height - 6, "middle");
  if (!y) return { drawing, box, sx };
  const sy = scale(y, box.bottom, box.top);
  for (const tick of ticks(y)) {
    drawing.append(svg("path.grid", { d: `M${box.left},${sy(tick)}H${box.right}` }));
    label(tick, box.left - 6, sy(tick) + 4, "end");
  }
  label(y.label, 0, 0, "middle", { transform: `translate(12 ${middle.y}) rotate(-90)` });
  return { drawing, box, sx, sy };
}

// Puts marks {row, x, y, lines} into a drawing. The one nearest to the pointer or finger shows its
// lines; Tab reaches the first and arrow keys the others.
function readable(figure, drawing, marks) {
  const tip = html("div.tip", { role: "tooltip", hidden: "" });
  const tell = (told) => {
    tip.hidden = !told;
    if (!told) return;
    tip.replaceChildren(...told.lines.map((text) => html("div", text)));
    const room = drawing.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(told.x - tip.offsetWidth / 2, room))}px`;
    tip.style.top = `${told.y + 14}px`;
  };
  marks.forEach((each, place) => {
    const press = (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") tell(null);
      if (!step) return;
      event.preventDefault();
      marks[(place + step + marks.length) % marks.length].node.focus();
    };
    each.node = coloured(svg("g", {
      role: "img", tabindex: place ? -1 : 0, "aria-label": each.lines.join("; "),
      focus: () => tell(each), blur: () => tell(null), keydown: press,
    }, mark(each.row, each.x, each.y)), each.row);
    drawing.append(each.node);
  });
  const point = (event) => {
    const { left, top } = drawing.getBoundingClientRect();
    const away = ({ x, y }) => Math.hypot(x - event.clientX + left, y - event.clientY + top);
    const nearest = marks.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    tell(nearest && away(nearest) < 40 ? nearest : null);
  };
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && tell(null));
  figure.append(html("div.plot", drawing, tip));
}

const cellLines = (row) => [
  cellName(row),
  `F1 ${number(1)(row.f1)} ${interval(row.f1_low, row.f1_high)}, ${row.questions} questions`,
  `TTFT p50 ${ms(row.ttft_p50_ms)} ms, p99 ${ms(row.ttft_p99_ms)} ms`,
  `${number(0)(row.active_tokens)} active tokens`,
];

// Limits come from all cells, so that hiding a system does not move the others.
const f1Axis = {
  label: "F1 × 100",
  low: Math.max(0, Math.min(...cells.map((row) => row.f1_low)) - 2),
  high: Math.min(100, Math.max(...cells.map((row) => row.f1_high)) + 2),
};
function valueAxis(name, label, log) {
  const values = cells.map((row) => row[name]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return log ? { label, log, low: low / 1.3, high: high * 1.3 } : { label, low: 0, high: (high || 1) * 1.06 };
}

function scatter(figure, title, name, label, log) {
  const { drawing, sx, sy } = axes(figure, title, 320, valueAxis(name, label, log), f1Axis);
  const rows = cells.filter(isShown).sort((a, b) => a[name] - b[name]);
  for (const widths of groups(rows, (row) => [row.system, row.checkpoint, row.arm].join())) {
    drawing.append(line(widths[0], `M${widths.map((row) => `${sx(row[name])},${sy(row.f1)}`).join("L")}`));
  }
  const whisker = (row) => line(row, `M${sx(row[name])},${sy(row.f1_low)}V${sy(row.f1_high)}`, ".whisker");
  drawing.append(...rows.map(whisker));
  const marks = rows.map((row) => ({ row, x: sx(row[name]), y: sy(row.f1), lines: cellLines(row) }));
  readable(figure, drawing, marks);
}

// The best F1 under every limit on the P99 TTFT, for each system and weights of the recipe.
function budgetSteps(figure, title) {
  const axis = valueAxis("ttft_p99_ms", "limit on the P99 TTFT, ms (log)", true);
  const { drawing, box, sx, sy } = axes(figure, title, 320, axis, f1Axis);
  const marks = curves.map((curve) => curve.map((place) => cells[place])).flatMap((rows) => {
    if (!isShown(rows[0])) return [];
    const steps = rows.map((row) => ({ row, x: sx(row.ttft_p99_ms), y: sy(row.f1), lines: cellLines(row) }));
    const path = steps.map(({ x, y }, place) => (place ? `H${x}V${y}` : `M${x},${y}`)).join("");
    drawing.append(line(rows[0], `${path}H${box.right}`));
    return steps;
  });
  readable(figure, drawing, marks);
}

const ablations = result.differences.filter((row) => row.kind === "ablation");

function ablationPlot(figure, title) {
  const rows = ablations.filter(isShown);
  const reach = Math.max(1, ...ablations.flatMap((row) => [-row.low, row.high])) * 1.1;
  const axis = { label: "F1 minus the recipe's own F1, points", low: -reach, high: reach };
  const { drawing, box, sx } = axes(figure, title, 60 + 60 * rows.length, axis);
  drawing.append(svg("path.zero", { d: `M${sx(0)},${box.top}V${box.bottom}` }));
  const marks = rows.map((row, place) => {
    const y = box.top + 60 * place + 46;
    const cell = cellName({ ...row, arm: "" });
    drawing.append(svg("text.name", { x: box.left, y: y - 30 }, row.arm),
      svg("text", { x: box.left, y: y - 14 }, cell),
      line(row, `M${sx(row.low)},${y}H${sx(row.high)}`, ".whisker"));
    return { row, x: sx(row.mean), y, lines: [row.arm, cell, `${points(row)} points`] };
  });
  readable(figure, drawing, marks);
}

const PLOTS = {
  "F1 against active tokens": (figure, title) =>
    scatter(figure, title, "active_tokens", "active prefix tokens, mean", false),
  "F1 against time to first token": (figure, title) =>
    scatter(figure, title, "ttft_p50_ms", "TTFT p50, ms (log)", true),
  "Best F1 within a latency budget, arms left out": budgetSteps,
  ...(ablations.length && { "Arms against the recipe itself": ablationPlot }),
};

function drawPlots() {
  const toggle = (id, ...content) => html("button", {
    id: `show-${id}`, type: "button", "aria-pressed": String(!hidden().has(id)),
    click: () => {
      const without = hidden();
      if (!without.delete(id)) without.add(id);
      state.hide = [...without].join(" ");
      redraw(drawPlots);
      writeAddress();
    },
  }, content);
  const picture = (row) => coloured(svg("svg", { width: 18, height: 18 }, mark(row, 9, 9)), row);
  const systems = [...new Set(cells.map((row) => row.system))].map((system) =>
    toggle(system, picture({ system, checkpoint: "fine_tuned" }), systemName({ system })));
  const arms = hasArms ? [toggle("arms", "Arms")] : [];
  byId("legend").replaceChildren(...systems, ...arms);
  const figures = Object.keys(PLOTS).map((title) => html("figure", html("figcaption", title)));
  byId("figures").replaceChildren(...figures);
  Object.entries(PLOTS).forEach(([title, draw], place) => draw(figures[place], title));
}
