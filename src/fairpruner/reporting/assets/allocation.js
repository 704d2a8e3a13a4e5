"use strict";
// The rule of allocation.py and costs.py, in the page: conflict curves and a tolerance or a budget in, depths and costs out.
// Counts are Numbers: exact up to 2^53.

const METRICS = ["units", "params", "flops"];
const LATENCY = "latency_ms"; // where the page was given a latency table

function unpacked(text, type) {
  return new type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

// Running totals from 0, one longer than the values.
function running(values) {
  const totals = new Float64Array(values.length + 1);
  for (let i = 0; i < values.length; i++) totals[i + 1] = totals[i] + Number(values[i]);
  return totals;
}

// Runs [first, count, each] to the vector they stand for, as encoding.py writes them.
function decodedRuns(runs) {
  return runs.flatMap(([first, count, each]) => Array.from({ length: count * each }, (_, i) => first + Math.floor(i / each)));
}

// One space along an order of its units; without scores there is only the order.
function ranking(packed) {
  const order = unpacked(packed.order, Int32Array);
  if (!packed.steps) return { order };
  const overlaps = running(packed.steps);
  const protection = unpacked(packed.protection, Float32Array);
  const falling = Float64Array.from(protection).sort().reverse();
  return {
    order,
    overlaps, // [J + 1]
    tod: overlaps.map((o, m) => o / Math.max(m, 1)), // [J + 1]
    same: packed.same ? running(packed.same) : null, // [J + 1] units that both halves of the data would remove
    removal: unpacked(packed.removal, Float32Array), // [J] along the order
    protection, // [J] along the order
    mass: running(protection), // [J + 1] R-Score removed at each depth
    falling: running(falling), // [J + 1] the most R-Score that so many units hold
  };
}

// The first position in 0..last where a condition holds that never stops to hold; last + 1 if there is none.
function firstWhere(last, holds) {
  let low = 0, high = last + 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// How many of an ascending list are at most a value.
function countUpTo(values, value) {
  return firstWhere(values.length - 1, (i) => values[i] > value);
}

// Depths that leave enough units in a space, ascending; 0 always. Heads and experts are wide enough already.
function candidates(space, multipleOf) {
  const depths = [0], step = ["channel", "hidden"].includes(space.kind) ? multipleOf : 1;
  for (let depth = 1; depth <= space.size - space.min_keep; depth++) {
    if ([step, space.groups, space.multiple].every((divisor) => (space.size - depth) % divisor === 0)) depths.push(depth);
  }
  return depths;
}

// Ascending thresholds and the depth reached at each: the largest candidate with ToD at most the threshold.
function frontier(depths, tod) {
  const best = [];
  let least = 1; // tolerances stay below 1
  for (const depth of [...depths].reverse()) {
    if (tod[depth] < least) best.push(depth);
    least = Math.min(least, tod[depth]);
  }
  best.reverse();
  // Thresholds in [-1, 0] lead evenly to the depth that is free of conflict, so that gentle budgets are within reach.
  const [free, ...reached] = best;
  const gentle = depths.filter((depth) => depth <= free);
  return {
    thresholds: [...gentle.map((depth) => depth / Math.max(free, 1) - 1), ...reached.map((depth) => tod[depth])],
    depths: [...gentle, ...reached],
  };
}

// All spaces on one scale: the distinct thresholds, one step each.
class Dial {
  constructor(spaces, rankings, multipleOf) {
    this.tables = spaces.map((space, s) => frontier(candidates(space, multipleOf), rankings[s].tod));
    this.levels = [...new Set(this.tables.flatMap((table) => table.thresholds))].sort((a, b) => a - b);
    this.last = this.levels.length - 1;
  }

  depths(step) {
    return this.tables.map((table) => table.depths[countUpTo(table.thresholds, this.levels[step]) - 1]);
  }

  stepAt(tolerance) {
    return countUpTo(this.levels, tolerance) - 1;
  }

  tolerance(step) {
    return Math.max(0, this.levels[step]);
  }
}

// Axes whose indices belong to units, and how many are gone at each depth of an order of the units.
function axesOf(factors, items, orders) {
  const position = new Map(items.map((space, s) => [space.name, s]));
  return factors.map((factor) => ({
    size: factor.size,
    parts: Object.entries(factor.owned).filter(([name]) => position.has(name)).map(([name, runs]) => {
      const owned = decodedRuns(runs), s = position.get(name);
      return { s, gone: running(Array.from(orders[s], (unit) => owned[unit])) };
    }),
  }));
}

function lengthsOf(axes, depths) {
  return axes.map((axis) => axis.parts.reduce((size, { s, gone }) => size - gone[depths[s]], axis.size));
}

// The rule of latency.py: each operation has a fixed part, one that follows its work and one for each width, rounded up to the multiple.
class Latency {
  constructor(table, items, orders) {
    Object.assign(this, { original: table.original, multiple: table.multiple, ops: table.ops, axes: axesOf(table.factors, items, orders) });
    this.whole = table.ops.map(([factors]) => factors.reduce((work, f) => work * this.padded(table.factors[f].size), 1));
  }

  padded(length) {
    return Math.ceil(length / this.multiple) * this.multiple;
  }

  milliseconds(depths) {
    const lengths = lengthsOf(this.axes, depths);
    if (lengths.every((length, f) => length === this.axes[f].size)) return this.original;
    return this.ops.reduce((total, [factors, fixed, work, uneven, widths], o) => {
      const share = factors.reduce((product, f) => product * this.padded(lengths[f]), 1) / this.whole[o];
      const worked = fixed + (factors.some((f) => lengths[f] % this.multiple) ? work + uneven : work) * share;
      return total + factors.reduce((sum, f, a) => sum + widths[a] * (this.padded(lengths[f]) / this.padded(this.axes[f].size)), worked);
    }, 0);
  }
}

// Costs of every plan that removes a prefix of a fixed order of units in each space.
class Costs {
  constructor(spaces, orders, table) {
    this.experts = spaces.items.map((space) => space.kind === "expert");
    this.sizes = spaces.items.map((space) => space.size);
    this.terms = Object.fromEntries(["params", "flops", "bytes"].filter((metric) => spaces.costs[metric].length).map((metric) => [metric, spaces.costs[metric]]));
    this.axes = axesOf(spaces.costs.factors, spaces.items, orders);
    this.latency = table && new Latency(table, spaces.items, orders);
    this.original = this.totals(this.sizes.map(() => 0));
  }

  totals(depths) {
    const lengths = lengthsOf(this.axes, depths);
    const units = (counts) => this.sizes.reduce((kept, size, s) => (counts[s] ? kept + size - depths[s] : kept), 0);
    const totals = { units: units(this.sizes), params: 0, flops: 0 };
    for (const [metric, terms] of Object.entries(this.terms)) {
      totals[metric] = terms.reduce((total, [coefficient, factors]) => total + factors.reduce((cost, f) => cost * lengths[f], coefficient), 0);
    }
    if (this.experts.some(Boolean)) totals.experts = units(this.experts);
    if (this.latency) totals[LATENCY] = this.latency.milliseconds(depths);
    return totals;
  }

  // A cost shared out over the spaces: a term goes evenly to its axes, an axis to its spaces by the indices they keep.
  bySpace(metric, depths) {
    const lengths = lengthsOf(this.axes, depths), shares = this.sizes.map(() => 0);
    for (const [coefficient, factors] of this.terms[metric]) {
      const cost = factors.reduce((product, f) => product * lengths[f], coefficient);
      for (const f of factors) {
        for (const { s, gone } of this.axes[f].parts) {
          shares[s] += ((cost / factors.length) * (gone[gone.length - 1] - gone[depths[s]])) / lengths[f];
        }
      }
    }
    return shares;
  }
}

// The position in 0..last that keeps nearest to a target within reach: the first within it or the one before; of equals, the
// one that removes least. What never rises is found by bisection, by `first`.
function nearest(kept, last, target, first = firstWhere) {
  const below = first(last, (position) => kept(position) <= target);
  if (below === 0 || kept(below - 1) - target > target - kept(below)) return below;
  return first(last, (position) => kept(position) <= kept(below - 1));
}

// As firstWhere, for a condition that may stop to hold: latency rises where widths become uneven.
function firstAlong(last, holds) {
  let position = 0;
  while (position <= last && !holds(position)) position++;
  return position;
}

// The count that a share stands for, without the float noise of the product.
function target(share, original) {
  return Number((share * original).toFixed(Math.max(0, 14 - String(original).length)));
}

// floor(alpha * m), exactly: quotients compare like the fractions they round.
function allowed(alpha, depth) {
  let count = Math.floor(alpha * depth);
  while (count < depth && (count + 1) / depth <= alpha) count++;
  while (count > 0 && count / depth > alpha) count--;
  return count;
}

// The paper's sharp bound A(m, alpha) on the R-Score mass that a depth can hold at a tolerance.
function massBound(ranking, depth, alpha) {
  if (depth === 0) return 0;
  const tolerated = allowed(alpha, depth), { falling } = ranking, size = falling.length - 1;
  return falling[tolerated] + falling[Math.min(2 * depth - tolerated, size)] - falling[Math.min(depth, size)];
}
