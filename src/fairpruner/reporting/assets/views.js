"use strict";
// One function for each view: makes its chart once and returns what brings it up to date with the chosen plan.
// `plan` holds rankings, depths, alpha, totals; `page` holds names, spaces, the selected space and how to select another.

function profileView(page) {
  const { names } = page;
  let plan = page.plan;
  const kept = (plan) => page.spaces.map((space, s) => 1 - plan.depths[s] / space.size);
  const uniform = () => plan.totals.units / page.original.units;
  const view = chart("profile", {
    data: [names.map((_, s) => s), kept(plan)],
    series: [unseen()],
    scales: { ...bySpace(names), y: { range: [0, 1] } },
    axes: [spaceAxis(names), share()],
    height: 300,
    draw: [
      (pen) => {
        pen.bars(kept(plan), "a-soft");
        pen.bars(kept(plan), "a", { only: page.selected });
        pen.line([-0.6, names.length - 0.4], [uniform(), uniform()], "b", { dash: [6, 4] });
      },
    ],
    pointed: (s) => {
      const space = page.spaces[(s ??= page.selected)];
      return `${space.name}: keeps ${space.size - plan.depths[s]} of ${space.size} (${percent(kept(plan)[s])}); uniform ${percent(uniform())}`;
    },
  });
  view.u.over.addEventListener("click", () => view.u.cursor.idx != null && page.select(view.u.cursor.idx));
  view.place.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    page.select(Math.min(Math.max(page.selected + move, 0), names.length - 1));
  });
  return (chosen) => {
    plan = chosen;
    view.u.setData([view.u.data[0], kept(plan)], false);
    view.place.setAttribute("aria-label", `Kept share of units of ${names.length} spaces; left and right arrow keys choose a space. ${names[page.selected]} keeps ${percent(kept(plan)[page.selected])}.`);
    view.refresh();
  };
}

function conflictView(page) {
  const grid = Array.from({ length: 201 }, (_, i) => i / 200); // share of units removed
  let plan = page.plan, nearest = null;
  const sampled = (s) => grid.map((x) => plan.rankings[s].tod[Math.round(x * page.spaces[s].size)]);
  const view = chart("conflict", {
    data: [grid, ...page.names.map((_, s) => sampled(s))],
    series: page.names.map(() => ({ stroke: () => colour("faint"), width: 1, points: { show: false } })),
    scales: { y: { range: [-0.02, 1.02] } },
    axes: [below("units removed", { values: inPercent }), axis({ label: "ToD" })],
    options: {
      cursor: { focus: { prox: 24 }, points: { show: false } },
      focus: { alpha: 1 },
      hooks: { setSeries: [(u, series) => { nearest = series === null ? null : series - 1; }] },
    },
    draw: [
      (pen) => {
        const { tod } = plan.rankings[page.selected], size = tod.length - 1;
        pen.line(tod.map((_, m) => m / size), tod, "a", { width: 2.5 });
        if (plan.alpha !== null) pen.line([0, 1], [plan.alpha, plan.alpha], "b", { dash: [6, 4] });
        pen.dots(plan.depths.map((m, s) => m / page.spaces[s].size), plan.depths.map((m, s) => plan.rankings[s].tod[m]), "c", { size: 2.5 });
        const m = plan.depths[page.selected];
        pen.dots([m / size], [tod[m]], "a", { size: 5, hollow: true });
      },
    ],
    pointed: (i) => {
      const s = i !== null && nearest !== null ? nearest : page.selected, m = plan.depths[s];
      return `${page.names[s]}: ToD ${plan.rankings[s].tod[m].toFixed(3)} at depth ${m} of ${page.spaces[s].size}`;
    },
  });
  view.u.over.addEventListener("click", () => nearest !== null && page.select(nearest));
  return (chosen) => {
    if (chosen.rankings !== plan.rankings) {
      plan = chosen;
      view.u.setData([grid, ...page.names.map((_, s) => sampled(s))]);
    }
    plan = chosen;
    const within = plan.depths.filter((m, s) => plan.alpha !== null && plan.rankings[s].tod[m] <= plan.alpha).length;
    view.place.setAttribute("aria-label", `Conflict curves of ${page.names.length} spaces; ${within} lie within the tolerance.`);
    view.refresh();
  };
}

function toleranceView(page) {
  const grid = Array.from({ length: 200 }, (_, i) => i / 200);
  let plan = page.plan;
  const shares = (dial) => {
    const totals = grid.map((alpha) => page.costs.totals(dial.depths(dial.stepAt(alpha))));
    return SHOWN.map((metric) => totals.map((kept) => kept[metric] / (page.original[metric] || 1)));
  };
  const stepped = uPlot.paths.stepped({ align: 1 });
  const line = (name, dash) => ({ stroke: () => colour(name), width: 2, dash, paths: stepped, points: { show: false } });
  let dial = page.dial;
  const view = chart("tolerance", {
    data: [grid, ...shares(dial)],
    series: [line("a"), line("c", [8, 4]), line("b", [2, 3]), line("soft")].slice(0, SHOWN.length),
    scales: { y: { range: [0, 1] } },
    axes: [below("tolerance"), share({ label: "kept" })],
    draw: [(pen) => plan.alpha !== null && pen.line([plan.alpha, plan.alpha], [0, 1], "soft", { width: 1, dash: [3, 3] })],
    pointed: (i) => {
      const at = (values) => SHOWN.map((metric, k) => `${metric === LATENCY ? "latency" : metric} ${percent(values[k])}`).join(", ");
      if (i !== null) return `Tolerance ${grid[i]}: keeps ${at(view.u.data.slice(1).map((values) => values[i]))}`;
      return `Chosen: keeps ${at(SHOWN.map((metric) => plan.totals[metric] / (page.original[metric] || 1)))}`;
    },
  });
  return (chosen) => {
    plan = chosen;
    if (page.dial !== dial) view.u.setData([grid, ...shares((dial = page.dial))]);
    view.place.setAttribute("aria-label", `Kept share against tolerance. ${view.place.nextElementSibling.textContent}`);
    view.refresh();
  };
}

// Scores have no natural size.
function score(value) {
  const plain = value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4);
  return plain ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function scoresView(page) {
  let plan = page.plan;
  const ranks = (count) => Array.from({ length: count }, (_, i) => i + 1);
  const sorted = () => { // places of the removal order, by falling protection
    const { protection } = plan.rankings[page.selected];
    return Array.from(protection.keys()).sort((a, b) => protection[b] - protection[a]);
  };
  const options = (extra) => ({
    data: [[1], [0]],
    series: [{ stroke: () => colour("a"), width: 2, points: { show: false } }],
    scales: { x: { time: false, range: (u, low, high) => [low - 0.5, high + 0.5] } },
    axes: [below("units", { incrs: [1, 2, 5].flatMap((digit) => [1, 10, 100, 1000, 10000].map((size) => digit * size)).sort((a, b) => a - b) }), axis({ size: 60, values: (u, splits) => splits.map(score) })],
    height: 220,
    pointed: () => {
      const depth = plan.depths[page.selected], ranking = plan.rankings[page.selected];
      const share = ranking.mass[depth] / (ranking.mass[ranking.mass.length - 1] || 1);
      return `${page.names[page.selected]}: ${depth} of ${page.spaces[page.selected].size} units are removed, with ${percent(share)} of the protection scores`;
    },
    ...extra,
  });
  let order = sorted();
  const removal = chart("removal", options({ draw: [(pen) => plan.depths[page.selected] && pen.band(0.5, plan.depths[page.selected] + 0.5, "b-soft")] }));
  const protection = chart("protection", options({
    draw: [
      (pen) => {
        const values = plan.rankings[page.selected].protection, gone = order.map((place) => place < plan.depths[page.selected]);
        pen.dots(ranks(order.length).filter((_, i) => gone[i]), order.filter((_, i) => gone[i]).map((place) => values[place]), "b", { size: 2 });
      },
    ],
  }));
  return (chosen) => {
    plan = chosen;
    order = sorted();
    const ranking = plan.rankings[page.selected];
    removal.u.setData([ranks(order.length), Array.from(ranking.removal)]);
    protection.u.setData([ranks(order.length), order.map((place) => ranking.protection[place])]);
    removal.place.setAttribute("aria-label", `Removal scores of ${page.names[page.selected]} in removal order`);
    protection.place.setAttribute("aria-label", `Protection scores of ${page.names[page.selected]}, the highest first`);
    [removal, protection].forEach((view) => view.refresh());
  };
}

function stabilityView(page) {
  const { names, data } = page;
  let plan = page.plan;
  const column = (k) => data.stability.map((pair) => pair[k]);
  const overlap = (s) => (plan.depths[s] && plan.rankings[s].same ? plan.rankings[s].same[plan.depths[s]] / plan.depths[s] : null);
  const lowest = Math.min(0, ...data.stability.flat());
  const view = chart("stability", {
    data: [names.map((_, s) => s), column(0), column(1)],
    series: [unseen(), unseen()],
    scales: { ...bySpace(names), y: { range: [Math.floor(10 * lowest) / 10, 1.05] } },
    axes: [spaceAxis(names), axis()],
    height: 300,
    draw: [
      (pen) => {
        const places = names.map((_, s) => s);
        pen.bars(places.map(overlap), "pale");
        pen.dots(places, column(0), "a");
        pen.dots(places, column(1), "b", { hollow: true });
      },
    ],
    pointed: (s) => {
      const shown = (value) => (value === null ? "–" : value.toFixed(2));
      const [removal, protection] = data.stability[(s ??= page.selected)];
      return `${names[s]}: removal ${shown(removal)}, protection ${shown(protection)}, same removed units ${shown(overlap(s))}`;
    },
  });
  view.u.over.addEventListener("click", () => view.u.cursor.idx != null && page.select(view.u.cursor.idx));
  view.place.setAttribute("aria-label", `Rank correlation between two halves of the data, for ${names.length} spaces`);
  return (chosen) => {
    plan = chosen;
    view.refresh();
  };
}

function massView(page) {
  const { names } = page;
  let plan = page.plan;
  const parts = (s) => {
    const ranking = plan.rankings[s], depth = plan.depths[s], all = ranking.mass[ranking.mass.length - 1] || 1;
    const alpha = Math.max(plan.alpha ?? 0, ranking.tod[depth]);
    return { removed: ranking.mass[depth] / all, bound: massBound(ranking, depth, alpha) / all };
  };
  const view = chart("mass", {
    data: [names.map((_, s) => s), names.map(() => 0)],
    series: [unseen()],
    scales: { ...bySpace(names), y: { range: () => [0, Math.max(...names.map((_, s) => parts(s).bound), 0.05) * 1.05] } },
    axes: [spaceAxis(names), share()],
    height: 300,
    draw: [
      (pen) => {
        const all = names.map((_, s) => parts(s));
        pen.bars(all.map((part) => part.removed), "a");
        pen.caps(all.map((part) => part.bound), "b");
      },
    ],
    pointed: (s) => {
      const { removed, bound } = parts((s ??= page.selected));
      return `${names[s]}: ${percent(removed)} of its protection scores removed, at most ${percent(bound)} possible`;
    },
  });
  view.u.over.addEventListener("click", () => view.u.cursor.idx != null && page.select(view.u.cursor.idx));
  return (chosen) => {
    plan = chosen;
    view.u.setData(view.u.data);
    view.place.setAttribute("aria-label", `Removed protection scores, and their bound, for ${names.length} spaces`);
    view.refresh();
  };
}

// Measured models as points; gone where nothing was measured against this number.
function measuredView(id, number, measured, label) {
  const points = Object.entries(measured).filter(([, values]) => "accuracy" in values && number in values);
  points.sort(([, a], [, b]) => a[number] - b[number]);
  if (!points.length) return document.getElementById(id).closest("figure").remove();
  const [xs, ys] = [number, "accuracy"].map((name) => points.map(([, values]) => values[name]));
  const padded = (values, room) => {
    const low = Math.min(...values), high = Math.max(...values), edge = (high - low || Math.abs(high) || 1) * room;
    return [low - edge, high + edge];
  };
  const view = chart(id, {
    data: [xs, ys],
    series: [unseen()],
    scales: { x: { time: false, range: () => padded(xs, 0.12) }, y: { range: () => padded(ys, 0.2) } },
    axes: [below(label, { values: (u, splits) => splits.map(short) }), axis({ size: 56 })],
    draw: [
      (pen) => {
        pen.dots(xs, ys, "a", { size: 4 });
        points.forEach(([name], i) => pen.text(name, xs[i], ys[i]));
      },
    ],
    pointed: (i) => (i === null ? "" : `${points[i][0]}: accuracy ${ys[i]}, ${label} ${short(xs[i])}`),
  });
  view.place.setAttribute("aria-label", `Accuracy against ${label} of ${points.length} models; the numbers are in the table below`);
}
