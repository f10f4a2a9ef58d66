"use strict";
// Curves: runs over each other, seeds as a band; a click or Enter leads to a step's dialogues.
const charts = new Map(); // element to its uPlot

function smoothed(values, weight) {
  let mean = null;
  return values.map((y) =>
    y === null ? null : (mean = mean === null ? y : weight * mean + (1 - weight) * y),
  );
}

// Of lines of one colour: on the chart, and in its legend.
const DASHES = [[[], "solid"], [[6, 4], "dashed"], [[2, 3], "dotted"], [[12, 4], "double"]];

function figure(y) {
  if (y === null || y === undefined) return "–";
  const size = Math.abs(y);
  return size && (size < 1e-4 || size >= 1e6) ? y.toExponential(2).replace(/\.?0+e/, "e") : String(Number(y.toPrecision(4)));
}

// Where a step lies on the axis: itself, or what was spent until then.
const SPENT = {
  tokens: (at) => (at("time/rollout_s") ?? 0) * (at("throughput/action_tokens_per_s") ?? 0),
  minutes: (at) => (at("time/step_s") ?? 0) / 60,
};

function placesOf(runs) {
  const spent = SPENT[$("x").value];
  if (!spent) return data.steps;
  const sums = runs.map((run) => {
    let total = 0;
    return data.steps.map((step, i) => (total += (step - (data.steps[i - 1] ?? step - 1)) * spent((name) => run.metrics[name]?.[i])));
  });
  return data.steps.map((_, i) => sums.reduce((total, own) => total + own[i], 0) / runs.length);
}

// Two-sided 97.5 % points of Student's t for 1, 2, ... degrees of freedom; beyond them about normal.
const STUDENT = [
  12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
];

function interval(columns) {
  const bands = { mean: [], low: [], high: [] };
  data.steps.forEach((_, i) => {
    const ys = columns.map((c) => c[i]).filter((y) => y !== null);
    const mean = ys.length ? ys.reduce((a, b) => a + b) / ys.length : null;
    const squares = ys.reduce((sum, y) => sum + (y - mean) ** 2, 0);
    const margin =
      ys.length > 1
        ? (STUDENT[ys.length - 2] || 2) * Math.sqrt(squares / (ys.length - 1) / ys.length)
        : null;
    bands.mean.push(mean);
    bands.low.push(margin === null ? null : mean - margin);
    bands.high.push(margin === null ? null : mean + margin);
  });
  return bands;
}

// Runs that are one line: seeds of the same settings, each run, or those of a setting's value.
function variantOf(run) {
  const by = $("by").value;
  return by === "seeds" ? run.variant : by === "runs" ? run.name : `${by} ${run.settings[by]}`;
}

function linesOf(chart) {
  const variants = [...new Set(data.runs.map(variantOf))];
  const found = [];
  for (const [v, variant] of variants.entries())
    for (const [l, line] of chart.lines.entries()) {
      const has = (run) => Object.hasOwn(run.metrics, line.metric); // one may be `constructor`
      const runs = data.runs.filter((run) => variantOf(run) === variant && has(run));
      if (!runs.length) continue;
      const agent = data.agents.indexOf(line.label);
      const label = [variants.length > 1 || !line.label ? variant : "", line.label]
        .filter(Boolean)
        .join(" · ");
      found.push({
        runs,
        label,
        metric: line.metric,
        colour: css(`--c${(variants.length > 1 ? v : agent < 0 ? l : agent) % 8}`),
        dash: variants.length > 1 ? DASHES[l % 4][0] : [],
        border: variants.length > 1 ? DASHES[l % 4][1] : "solid",
      });
    }
  return found;
}

function seriesOf(chart) {
  const weight = Number($("smooth").value),
    tables = [],
    series = [{ label: $("x").value, value: (_, x) => figure(x) }],
    bands = [];
  const fixed = [];
  const add = (values, options) => {
    tables.at(-1).push(values);
    series.push({ spanGaps: true, ...options });
  };
  for (const line of linesOf(chart)) {
    const seeds = line.runs.map((run) => smoothed(run.metrics[line.metric], weight));
    const { mean, low, high } = interval(seeds);
    const stroke = line.colour,
      value = (_, y) => figure(y);
    fixed.push(mean);
    tables.push([placesOf(line.runs)]);
    add(mean, {
      label: line.label,
      stroke,
      width: 2,
      dash: line.dash,
      border: line.border,
      value,
      points: { show: mean.filter((y) => y !== null).length < 40, size: 5 }, // a single one, too
    });
    if (seeds.length < 2) continue;
    for (const edge of [high, low])
      add(edge, { class: "unnamed", stroke: "transparent", points: { show: false } });
    bands.push({ series: [series.length - 2, series.length - 1], fill: stroke + "30" });
    if ($("seeds").checked)
      for (const seed of seeds) {
        fixed.push(seed);
        add(seed, { class: "unnamed", stroke: stroke + "80", width: 1, points: { show: false } });
      }
  }
  return { tables, series, bands, fixed };
}

function reading(step) {
  // the chapter that is nearest to a step
  let best = null;
  for (const [part, steps] of Object.entries(data.read))
    for (const s of steps)
      if (best === null || Math.abs(s - step) < Math.abs(best.s - step)) best = { s, part };
  return best;
}

function readStep(step) {
  const best = reading(step);
  if (best) location.hash = `#${best.part}-s${best.s}`;
}

function ticks(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.fillStyle = css("--accent");
  const steps = $("x").value === "step" ? Object.values(data.read).flat() : [];
  for (const step of new Set(steps)) {
    const x = u.valToPos(step, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width)
      ctx.fillRect(x - 1, bbox.top + bbox.height - 6 * devicePixelRatio, 2, 6 * devicePixelRatio);
  }
  ctx.restore();
}

// A line before the step at which a later start changed settings.
function changed(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = css("--quiet");
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const run of data.runs)
    for (const step of run.changed) {
      const place = placesOf([run])[data.steps.findIndex((s) => s >= step)];
      const x = u.valToPos(place ?? NaN, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  ctx.restore();
}

// The range of a chart: of all values, but not of the few that lie far beyond the others.
function limits(fixed) {
  const ys = fixed.flat().filter((y) => y !== null).sort((a, b) => a - b);
  if (!ys.length) return [0, 1];
  const at = (share) => ys[Math.round(share * (ys.length - 1))];
  let [low, high] = [ys[0], ys.at(-1)];
  const far = 3 * (at(0.95) - at(0.05));
  if (far && !$("whole").checked) {
    if (high > at(0.95) + far) high = ys.findLast((y) => y <= at(0.95) + far);
    if (low < at(0.05) - far) low = ys.find((y) => y >= at(0.05) - far);
  }
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - room, high + room];
}

// Marks values beyond the range at the edge that they lie beyond.
function beyond(u) {
  const { ctx, bbox } = u;
  const { min, max } = u.scales.y;
  ctx.save();
  ctx.fillStyle = css("--warn");
  u.data.forEach((ys, s) => {
    if (!s || u.series[s].stroke() === "transparent") return;
    ys.forEach((y, i) => {
      if (y === null || y === undefined || (y >= min && y <= max)) return;
      const x = u.valToPos(u.data[0][i], "x", true), size = 5 * devicePixelRatio;
      const [edge, inner] = y > max ? [bbox.top, size * 1.6] : [bbox.top + bbox.height, -size * 1.6];
      ctx.beginPath();
      ctx.moveTo(x, edge);
      ctx.lineTo(x - size, edge + inner);
      ctx.lineTo(x + size, edge + inner);
      ctx.fill();
    });
  });
  ctx.restore();
}

let zoom = null; // of all charts, along x
let zooming = false;
function zoomed(u, key) {
  if (key !== "x" || zooming || !u.ready) return;
  const { min, max } = u.scales.x, xs = u.data[0];
  zoom = min > xs[0] || max < xs.at(-1) ? { min, max } : null;
  zooming = true;
  for (const other of charts.values())
    if (other !== u) other.setScale("x", zoom ?? { min: other.data[0][0], max: other.data[0].at(-1) });
  zooming = false;
}

function drawOne(box, chart) {
  charts.get(box)?.destroy();
  charts.delete(box);
  const { tables, series, bands, fixed } = seriesOf(chart);
  box.classList.toggle("flat", fixed.flat().every((y) => !y));
  box.replaceChildren(box.matches(".flat") ? "0 at every step" : "");
  if (box.matches(".flat") || !tables.length) return;
  const columns = uPlot.join(tables), byStep = $("x").value === "step";
  const [low, high] = limits(fixed);
  const axis = {
    stroke: css("--quiet"),
    grid: { stroke: css("--line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui",
  };
  const u = new uPlot(
    {
      width: box.clientWidth,
      height: 200,
      series,
      bands,
      scales: { x: { time: false, ...zoom }, y: { range: [low, high] } },
      axes: [
        { ...axis, size: 34, ...(byStep && { incrs: WHOLE }), values: (_, xs) => xs.map(figure) },
        { ...axis, size: 66, values: (_, ys) => ys.map(figure) },
      ],
      cursor: { sync: { key: "steps" }, points: { size: 7 } },
      legend: { markers: { width: 3, dash: (u, i) => u.series[i].border } },
      hooks: { draw: [ticks, changed, beyond], setScale: [zoomed], ready: [(u) => (u.ready = true)] },
    },
    columns,
    box,
  );
  u.over.addEventListener("click", () => {
    const selects = u.select.width > 0;
    if (!selects && u.cursor.idx !== null) readStep(stepAt(u.cursor.idx, u));
  });
  u.root.querySelector(".u-legend").tabIndex = 0; // it scrolls where there are many lines
  charts.set(box, u);
}

const WHOLE = Array.from({ length: 8 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** i)).flat();

// The step of a point: where lines have places of their own, that of the nearest run.
function stepAt(index, u) {
  const x = u.data[0][index];
  const places = data.runs.flatMap((run) => placesOf([run]).map((place, i) => [Math.abs(place - x), i]));
  return data.steps[places.reduce((best, one) => (one[0] < best[0] ? one : best))[1]];
}

function chartBox(chart) {
  const box = make("div", {
    class: "plot",
    tabindex: "0",
    role: "group",
    "aria-label": `Curve of ${chart.name}`,
  });
  box.addEventListener("keydown", (event) => {
    const u = charts.get(box);
    if (!u) return;
    const xs = u.data[0],
      way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) {
      const next = Math.min(Math.max((u.cursor.idx ?? 0) + way, 0), xs.length - 1);
      u.setCursor({ left: u.valToPos(xs[next], "x"), top: 20 });
    } else if (event.key === "Enter" && u.cursor.idx !== null) readStep(stepAt(u.cursor.idx, u));
    else return;
    event.preventDefault();
  });
  const title = make("h2", {}, make("code", {}, chart.name));
  return [make("figure", {}, make("figcaption", {}, title, chart.meaning), box), box];
}

function groupings() {
  const keys = data.runs.flatMap((run) => Object.keys(run.settings));
  for (const key of new Set(keys)) $("by").append(make("option", {}, key));
  $("by").parentElement.hidden = data.runs.length < 2;
}

function draw() {
  const places = [
    [$("charts"), data.charts.filter((c) => c.meaning)],
    [$("others"), data.charts.filter((c) => !c.meaning)],
  ];
  for (const [place, some] of places) {
    if (place.closest("details:not([open])")) continue;
    for (const [i, chart] of some.entries()) {
      if (!place.children[i]) place.append(chartBox(chart)[0]);
      drawOne(place.children[i].querySelector(".plot"), chart);
    }
  }
  const seeds = new Set(data.runs.map(variantOf)).size < data.runs.length;
  $("seeds").parentElement.hidden = !seeds;
  $("band").textContent = seeds
    ? "Of runs that are one line: mean and its 95 % interval (Student)."
    : "";
  if (!data.charts.length) $("charts").textContent = "No metrics yet.";
}
