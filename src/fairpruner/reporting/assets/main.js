"use strict";
// The page itself: which plan is chosen, the controls that choose it, the tables, and the file that is saved.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const spaces = data.spaces.items;
const scored = data.scored && data.scored.map(ranking);
const given = data.given ? data.given.map(ranking) : scored;
const multipleOf = () => Number($("multiple").value);
const SHOWN = data.latency ? [...METRICS, LATENCY] : METRICS;

const page = {
  data,
  spaces,
  names: spaces.map((space) => space.name),
  original: data.plan.original,
  costs: scored && new Costs(data.spaces, scored.map((r) => r.order), data.latency),
  dial: scored && new Dial(spaces, scored, 1),
  selected: 0,
  select(s) {
    page.selected = s;
    if (scored) $("space").value = String(s);
    show();
  },
};
const givenCosts = data.given ? new Costs(data.spaces, given.map((r) => r.order), data.latency) : page.costs;
const asGiven = {
  rule: data.plan.rule,
  alpha: data.plan.alpha,
  exact: data.plan.exact,
  rankings: given,
  costs: givenCosts,
  depths: page.names.map((name) => data.plan.removed[name].length),
  totals: data.plan.predicted,
};
page.plan = asGiven;

// What `allocate` answers for a tolerance, or for a share of a metric to keep.
function allocated(mode, value) {
  const { dial, costs } = page;
  const kept = (step) => costs.totals(dial.depths(step))[mode];
  const step = {
    alpha: () => dial.stepAt(value),
    [LATENCY]: () => nearest((s) => latencies()[s], dial.last, value * page.original[LATENCY], firstAlong),
  }[mode]?.() ?? nearest(kept, dial.last, target(value, page.original[mode]));
  const depths = dial.depths(step);
  return { rule: "tod", alpha: mode === "alpha" ? value : dial.tolerance(step), exact: false, rankings: scored, costs, depths, totals: costs.totals(depths) };
}

// Predicted milliseconds at every step of the dial, worked out once for each dial.
function latencies() {
  const { dial, costs } = page;
  dial.latencies ??= dial.levels.map((_, step) => costs.latency.milliseconds(dial.depths(step)));
  return dial.latencies;
}

const mode = () => document.querySelector("input[name=mode]:checked").value;
const shareOf = (metric, amount) => amount / (page.original[metric] || 1);
const least = () => (mode() === LATENCY ? latencies().reduce((a, b) => Math.min(a, b)) : page.costs.totals(page.dial.depths(page.dial.last))[mode()]);
const smallest = () => shareOf(mode(), least());
const amountOf = (plan) => (mode() === "alpha" ? plan.alpha ?? 0 : shareOf(mode(), plan.totals[mode()]));

// Put the controls where the plan is.
function setControls() {
  const budget = mode() !== "alpha", label = { alpha: "Tolerance", units: "Units kept", params: "Params kept", flops: "FLOPs kept", [LATENCY]: "Latency kept" }[mode()];
  $("slider-label").textContent = label;
  $("slider").min = budget ? Math.ceil(1000 * smallest()) / 1000 : 0;
  $("slider").max = budget ? 1 : 0.999;
  $("slider").value = amountOf(page.plan);
  $("amount").value = Number(amountOf(page.plan).toPrecision(6));
  describeSlider();
}

function describeSlider() {
  const value = Number($("slider").value);
  $("slider").setAttribute("aria-valuetext", mode() === "alpha" ? `tolerance ${value}` : `keep ${percent(value)}`);
}

function choose(value) {
  const budget = mode() !== "alpha";
  const reach = budget ? [smallest(), 1] : [0, 1 - Number.EPSILON];
  const valid = value >= reach[0] && value <= reach[1];
  $("amount").setAttribute("aria-invalid", String(!valid));
  $("message").textContent = valid ? "" : budget ? `Out of reach: the smallest plan keeps ${percent(Math.ceil(1000 * reach[0]) / 1000)} of ${mode() === LATENCY ? "latency" : mode()}.` : "A tolerance lies in [0, 1).";
  if (!valid) return;
  page.plan = allocated(mode(), value);
  show();
}

// A row whose first cell is its head, or all of them are.
function rowOf(cells, scope = "row") {
  const row = document.createElement("tr");
  row.append(...cells.map((cell, i) => {
    const element = document.createElement(i && scope === "row" ? "td" : "th");
    if (element.tagName === "TH") element.scope = scope;
    element.append(cell instanceof Node ? cell : String(cell));
    return element;
  }));
  return row;
}

function rowsOf(plan) {
  const none = plan.depths.map(() => 0);
  const columns = ["params", "flops"].flatMap((metric) => [plan.costs.bySpace(metric, none), plan.costs.bySpace(metric, plan.depths)]);
  return spaces.map((space, s) => [space.size, space.size - plan.depths[s], ...columns.map((column) => column[s])]);
}

function makeTable() {
  $("table").tBodies[0].append(...spaces.map((space, s) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = space.name;
    button.addEventListener("click", () => page.select(s));
    const row = rowOf([button, space.kind, "", "", "", "", "", "", ""]);
    row.dataset.space = space.name;
    row.cells[4].className = "bar";
    row.cells[4].replaceChildren(document.createElement("i"));
    return row;
  }));
}

function showTable(plan) {
  const rows = rowsOf(plan);
  rows.forEach(([size, kept, ...costs], s) => {
    const row = $("table").tBodies[0].rows[s];
    row.dataset.kept = kept;
    row.classList.toggle("selected", s === page.selected);
    row.cells[2].textContent = counted(size);
    row.cells[3].textContent = counted(kept);
    row.cells[4].firstChild.style.width = `${(100 * kept) / size}%`;
    costs.forEach((cost, i) => (row.cells[5 + i].textContent = counted(cost)));
  });
  const inside = [2, 3, 4, 5].map((column) => rows.reduce((sum, row) => sum + row[column], 0));
  const totals = [page.original.params, plan.totals.params, page.original.flops, plan.totals.flops];
  const outside = ["outside all spaces", "", "", "", "", ...totals.map((total, i) => counted(total - inside[i]))];
  const all = ["Total", "", counted(page.original.units), counted(plan.totals.units), percent(plan.totals.units / page.original.units), ...totals.map(counted)];
  const more = Object.keys(plan.totals).filter((metric) => !METRICS.includes(metric)); // bytes, experts, a predicted latency
  const extra = more.map((metric) => [metric, "", ...[page.original, plan.totals].map((from) => amount(metric, from[metric])), percent(shareOf(metric, plan.totals[metric])), "", "", "", ""]);
  $("table").tFoot.replaceChildren(...[outside, all, ...extra].map((cells) => rowOf(cells)));
}

const amount = (metric, value) => (metric === LATENCY ? `${Number(value.toPrecision(3))} ms` : counted(value));

function showTiles(plan) {
  for (const metric of SHOWN) {
    const output = $(`kept-${metric}`), [kept, all] = [plan.totals[metric], page.original[metric]];
    output.textContent = percent(shareOf(metric, kept));
    output.dataset.value = kept;
    output.title = `${amount(metric, kept)} of ${amount(metric, all)}`;
    output.nextElementSibling.textContent = metric === LATENCY ? output.title : `${short(kept)} of ${short(all)}`;
  }
  $("kept-alpha").textContent = plan.alpha === null ? "–" : Number(plan.alpha.toPrecision(3));
  $("kept-alpha").dataset.value = plan.alpha;
  $("origin").textContent = plan === asGiven ? `${plan.rule}${plan.exact ? ", exact" : ""}: as given` : "chosen here";
}

let views = [];
let waiting = false;
function show() {
  showTiles(page.plan); // at once; the rest once per frame, however fast the slider moves
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    showTable(page.plan);
    views.forEach((view) => view(page.plan));
  });
}

// A plan as `Plan.load` reads it: without a digest, as one written by hand.
function planFile(plan) {
  const removed = Object.fromEntries(page.names.map((name, s) => [name, Array.from(plan.rankings[s].order.subarray(0, plan.depths[s]))]));
  const content = { ...data.file, rule: plan.rule, alpha: plan.alpha, exact: plan.exact, original: page.original, predicted: plan.totals, removed, spaces: data.spaces };
  return `{\n${Object.entries(content).map(([key, value]) => `${JSON.stringify(key)}: ${JSON.stringify(value)}`).join(",\n")}\n}\n`;
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([planFile(page.plan)], { type: "application/json" }));
  link.download = "plan.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  $("message").textContent = "Saved plan.json: give it to “fairpruner cut”.";
}

function fillTable(table, heads, rows) {
  table.createTHead().append(rowOf(heads, "col"));
  table.createTBody().append(...rows.map((cells) => rowOf(cells)));
}

function showMeasured() {
  const numbers = [...new Set(Object.values(data.measured).flatMap(Object.keys))];
  const shown = (value) => (value === undefined ? "–" : Number.isInteger(value) ? counted(value) : String(Number(value.toPrecision(5))));
  fillTable($("measured"), ["Model", ...numbers], Object.entries(data.measured).map(([model, values]) => [model, ...numbers.map((name) => shown(values[name]))]));
  measuredView("by-flops", "flops", data.measured, "FLOPs");
  measuredView("by-latency", "latency_ms", data.measured, "latency, ms");
}

const THEMES = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";

function paint(colours) {
  document.documentElement.dataset.theme = colours;
  charts.forEach((chart) => { fit(chart); chart.u.redraw(false); });
}

function setTheme(chosen) {
  theme = chosen;
  $("theme").textContent = THEMES[theme];
  $("theme").setAttribute("aria-label", theme === "auto" ? "Colours: those of the system" : `Colours: ${theme}`);
  paint(theme !== "auto" ? theme : systemIsDark.matches ? "dark" : "light");
}

function start() {
  const has = { scores: scored, latency: data.latency, stability: data.stability && data.stability.flat().some((value) => value !== null), measured: Object.keys(data.measured).length, tried: data.tried.rows.length, "left-out": Object.keys(data.spaces.left_out).length };
  document.querySelectorAll("[data-needs]").forEach((element) => has[element.dataset.needs] || element.remove());

  const { samples, removal, protection } = data.signals;
  const size = `${spaces.length} spaces · ${counted(page.original.units)} units · ${short(page.original.params)} params · ${short(page.original.flops)} FLOPs`;
  $("subtitle").textContent = scored ? `${size} · scored on ${counted(samples)} samples by ${removal} and ${protection}` : size;
  $("version").textContent = data.version;
  if (has.tried) fillTable($("tried"), data.tried.columns, data.tried.rows);
  if (has["left-out"]) fillTable($("left-out"), ["Place", "Reason"], Object.entries(data.spaces.left_out));
  makeTable();

  // Charts are made before the rest so that all of them measure their place at once.
  const makers = [profileView, ...(scored ? [conflictView, toleranceView, scoresView, massView] : []), ...(has.stability ? [stabilityView] : [])];
  views = makers.map((make) => make(page));
  if (has.measured) showMeasured();

  if (scored) {
    $("removal-name").textContent = `Removal: ${removal}`;
    $("protection-name").textContent = `Protection: ${protection}`;
    $("space").append(...page.names.map((name, s) => new Option(name, String(s))));
    $("space").addEventListener("change", () => page.select(Number($("space").value)));
    // A plan for a gentle budget removes less than its tolerance of 0 allows: the tolerance alone does not say which plan it is.
    const told = asGiven.alpha !== null && String(allocated("alpha", asGiven.alpha).depths) === String(asGiven.depths);
    document.querySelector(`input[name=mode][value=${told ? "alpha" : "flops"}]`).checked = true;
    setControls();
    document.querySelectorAll("input[name=mode]").forEach((radio) => radio.addEventListener("change", setControls));
    $("slider").addEventListener("input", () => {
      $("amount").value = $("slider").value;
      describeSlider();
      choose(Number($("slider").value));
    });
    $("amount").addEventListener("change", () => {
      $("slider").value = $("amount").value;
      describeSlider();
      choose($("amount").value === "" ? NaN : Number($("amount").value));
    });
    $("multiple").addEventListener("change", () => {
      const amount = amountOf(page.plan);
      page.dial = new Dial(spaces, scored, multipleOf());
      choose(mode() === "alpha" ? amount : Math.max(amount, smallest()));
      setControls();
    });
    $("reset").addEventListener("click", () => {
      $("multiple").value = "1";
      page.dial = new Dial(spaces, scored, 1);
      page.plan = asGiven;
      $("message").textContent = "";
      setControls();
      show();
    });
  }
  $("save").addEventListener("click", save);
  $("theme").addEventListener("click", () => {
    const themes = Object.keys(THEMES);
    setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);
  });
  systemIsDark.addEventListener("change", () => setTheme(theme));
  addEventListener("beforeprint", () => paint("light")); // paper is white
  addEventListener("afterprint", () => setTheme(theme));
  setTheme(theme);
  show();
}

start();
