// The page's head, and what happens when it opens.

function drawHead() {
  const { hardware, cpus, threads, date, commit, ...versions } = result.environment;
  const counts = Object.entries(result.questions_by_dataset);
  const facts = {
    Questions: counts.map(([name, count]) => `${name} ${count}`),
    Measured: [date.replace("T", " "), commit && `commit ${commit}`],
    Hardware: [hardware, `${cpus} CPUs`, `${threads} threads`],
    Versions: Object.entries(versions).map(([name, version]) => `${name} ${version}`),
  };
  byId("head").append(...Object.entries(facts).flatMap(([name, parts]) =>
    [html("dt", name), html("dd", parts.filter(Boolean).join(", "))]));
  byId("notes").append(...result.notes.map((note) => html("li", note)));
}

// Adds a section's tables, or takes the section away where the comparison has no such rows.
function fill(id, rows, tables) {
  if (rows.length) byId(id).append(...tables());
  else byId(id).remove();
}

function followAddress() {
  readAddress();
  drawPlots();
  showBrowser();
}

drawHead();
fill("results", cells, () => [resultsTable()]);
fill("budget", result.budget, () => [budgetTable()]);
fill("differences", result.differences, differencesTables);
fill("injection", result.injection, injectionTables);
document.querySelector("nav").append(...[...document.querySelectorAll("main > section")].map((section) =>
  html("a", { href: `#${section.id}` }, section.id)));
fillFilters();
followAddress();
if (state.q) byId("questions").scrollIntoView();

addEventListener("hashchange", () => {
  // A fragment without "=" is a section's name.
  if (location.hash.includes("=")) followAddress();
});
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  // Phones resize the window's height while scrolling, which moves nothing in the plots.
  if (innerWidth !== drawnWidth) redraw(drawPlots);
  drawnWidth = innerWidth;
});
