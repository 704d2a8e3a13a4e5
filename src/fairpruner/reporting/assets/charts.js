"use strict";
// What all charts share: colours of the theme, size, axes, marks drawn by hand, and a line of text for what is pointed at.

const charts = [];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)}\u00a0%`;
const counted = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 }); // halves show, so that columns add up

function short(value) {
  const [size, unit] = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / size).toPrecision(value / size >= 1000 ? 4 : 3))}${unit}`;
}

const FONT = "12px system-ui, sans-serif";
function axis(extra) {
  const label = { labelFont: FONT, labelSize: 20, labelGap: 0 };
  return { stroke: () => colour("soft"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false }, font: FONT, size: 44, gap: 6, ...label, ...extra };
}

// One along the bottom, with a label.
const below = (label, extra) => axis({ label, size: 26, ...extra });

// An axis of space names, as many of them as there is room for, the end of each.
function spaceAxis(names) {
  const end = (name) => (name.length > 14 ? `…${name.slice(-13)}` : name);
  return axis({
    rotate: 60,
    size: 16 + 5.6 * Math.max(...names.map((name) => end(name).length)),
    grid: { show: false },
    splits: (u) => {
      const step = Math.max(1, Math.ceil((16 * names.length) / Math.max(u.bbox.width / devicePixelRatio, 1)));
      return names.map((_, i) => i).filter((i) => i % step === 0);
    },
    values: (u, splits) => splits.map((i) => end(names[i])),
  });
}

// A chart in the element with this id; `pointed` gives the text for a position of the data, and for none.
function chart(id, { data, series, scales = {}, axes, height = 260, draw = [], pointed = () => "", options = {} }) {
  const place = document.getElementById(id);
  const caption = place.closest("figure").querySelector("figcaption");
  const u = new uPlot(
    {
      width: Math.max(place.clientWidth, 120),
      height,
      legend: { show: false },
      scales: { x: { time: false }, ...scales },
      axes,
      series: [{}, ...series],
      cursor: { drag: { setScale: false, x: false, y: false }, y: false, points: { size: 7 }, ...options.cursor },
      padding: [10, 20, 0, 0],
      focus: options.focus,
      hooks: {
        ...options.hooks,
        draw: draw.map((mark) => (u) => drawn(u, mark)),
        setCursor: [(u) => (caption.textContent = pointed(u.cursor.idx ?? null))],
      },
    },
    data,
    place,
  );
  const shown = { place, height, u, refresh: () => { u.redraw(false); caption.textContent = pointed(null); } };
  charts.push(shown);
  new ResizeObserver(() => fit(shown)).observe(place);
  return shown;
}

function fit({ place, height, u }) {
  const width = Math.max(place.clientWidth, 120);
  if (width !== u.width) u.setSize({ width, height });
}

// Draw inside the plotting area, with a pen that speaks in the chart's own values.
function drawn(u, mark) {
  const { ctx } = u;
  const x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true);
  const scale = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left - 4, u.bbox.top - 4, u.bbox.width + 8, u.bbox.height + 8);
  ctx.clip();
  mark({
    line(xs, ys, name, { width = 2, dash = [] } = {}) {
      ctx.beginPath();
      for (let i = 0; i < xs.length; i++) ctx.lineTo(x(xs[i]), y(ys[i]));
      Object.assign(ctx, { strokeStyle: colour(name), lineWidth: width * scale, lineJoin: "round" });
      ctx.setLineDash(dash.map((length) => length * scale));
      ctx.stroke();
    },
    dots(xs, ys, name, { size = 3, hollow = false } = {}) {
      Object.assign(ctx, { strokeStyle: colour(name), fillStyle: colour(hollow ? "card" : name), lineWidth: 1.5 * scale });
      ctx.setLineDash([]);
      for (let i = 0; i < xs.length; i++) {
        if (ys[i] === null) continue;
        ctx.beginPath();
        ctx.arc(x(xs[i]), y(ys[i]), size * scale, 0, 2 * Math.PI);
        ctx.fill();
        ctx.stroke();
      }
    },
    band(from, to, name) {
      ctx.fillStyle = colour(name);
      ctx.fillRect(x(from), u.bbox.top, x(to) - x(from), u.bbox.height);
    },
    bars(values, name, { width = 0.7, only = null } = {}) {
      ctx.fillStyle = colour(name);
      const wide = Math.min(Math.max((x(1) - x(0)) * width, scale), 64 * scale);
      values.forEach((value, i) => {
        if (value !== null && (only === null || only === i)) ctx.fillRect(x(i) - wide / 2, y(value), wide, y(0) - y(value));
      });
    },
    caps(values, name, { width = 0.9 } = {}) {
      ctx.fillStyle = colour(name);
      const wide = Math.min(Math.max((x(1) - x(0)) * width, 2 * scale), 82 * scale);
      values.forEach((value, i) => ctx.fillRect(x(i) - wide / 2, y(value) - scale, wide, 2 * scale));
    },
    text(label, at, value) {
      Object.assign(ctx, { fillStyle: colour("soft"), font: `${12 * scale}px system-ui, sans-serif`, textBaseline: "bottom" });
      const right = x(at) > u.bbox.left + u.bbox.width / 2;
      ctx.textAlign = right ? "right" : "left";
      ctx.fillText(label, x(at) + (right ? -7 : 7) * scale, y(value) - 4 * scale);
    },
  });
  ctx.restore();
}

// Charts are drawn by hand above invisible series, which the cursor follows.
const unseen = (extra) => ({ show: true, stroke: "transparent", points: { show: false }, ...extra });
const bySpace = (names) => ({ x: { time: false, range: [-0.6, names.length - 0.4] } });
const inPercent = (u, splits) => splits.map((value) => `${Math.round(100 * value)} %`);
const share = (extra) => axis({ values: inPercent, ...extra });
