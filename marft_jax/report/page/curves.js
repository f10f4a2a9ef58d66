"use strict";
// Curves: runs over each other, seeds as a band; a click or Enter leads to a step's dialogues.
const charts = new Map(); // element to its uPlot

function smoothed(values, weight) {
  let mean = null;
  return values.map((y) =>
    y === null ? null : (mean = mean === null ? y : weight * mean + (1 - weight) * y),
  );
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

function linesOf(chart) {
  const variants = [...new Set(data.runs.map((run) => run.variant))];
  const found = [];
  for (const [v, variant] of variants.entries())
    for (const [l, line] of chart.lines.entries()) {
      const has = (run) => Object.hasOwn(run.metrics, line.metric); // one may be `constructor`
      const runs = data.runs.filter((run) => run.variant === variant && has(run));
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
        dash: variants.length > 1 && l ? [2 + 4 * l, 4] : [],
      });
    }
  return found;
}

function seriesOf(chart) {
  const weight = Number($("smooth").value),
    columns = [data.steps],
    series = [{ label: "step" }],
    bands = [];
  const fixed = [];
  const add = (values, options) => {
    columns.push(values);
    series.push({ spanGaps: true, ...options });
  };
  for (const line of linesOf(chart)) {
    const seeds = line.runs.map((run) => smoothed(run.metrics[line.metric], weight));
    const { mean, low, high } = interval(seeds);
    const stroke = line.colour,
      value = (_, y) => (y === null || y === undefined ? "–" : Number(y.toPrecision(4)));
    fixed.push(mean);
    add(mean, {
      label: line.label,
      stroke,
      width: 2,
      dash: line.dash,
      value,
      points: { show: data.steps.length < 40, size: 5 },
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
  return { columns, series, bands, fixed };
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
  for (const step of new Set(Object.values(data.read).flat())) {
    const x = u.valToPos(step, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width)
      ctx.fillRect(x - 1, bbox.top + bbox.height - 6 * devicePixelRatio, 2, 6 * devicePixelRatio);
  }
  ctx.restore();
}

function limits(fixed) {
  const ys = fixed.flat().filter((y) => y !== null);
  let low = Infinity,
    high = -Infinity;
  for (const y of ys) {
    low = Math.min(low, y);
    high = Math.max(high, y);
  }
  if (!ys.length) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - room, high + room];
}

function drawOne(box, chart) {
  charts.get(box)?.destroy();
  const { columns, series, bands, fixed } = seriesOf(chart);
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
      scales: { x: { time: false }, y: { range: () => limits(fixed) } },
      axes: [
        { ...axis, size: 34 },
        { ...axis, size: 60 },
      ],
      cursor: { sync: { key: "steps" }, points: { size: 7 } },
      hooks: { draw: [ticks] },
    },
    columns,
    box,
  );
  u.over.addEventListener("click", () => {
    const selects = u.select.width > 0;
    if (!selects && u.cursor.idx !== null) readStep(data.steps[u.cursor.idx]);
  });
  charts.set(box, u);
}

function chartBox(chart) {
  const box = make("div", {
    class: "plot",
    tabindex: "0",
    role: "group",
    "aria-label": `Curve of ${chart.name}`,
  });
  box.addEventListener("keydown", (event) => {
    const u = charts.get(box),
      way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) {
      const next = Math.min(Math.max((u.cursor.idx ?? 0) + way, 0), data.steps.length - 1);
      u.setCursor({ left: u.valToPos(data.steps[next], "x"), top: 20 });
    } else if (event.key === "Enter" && u.cursor.idx !== null) readStep(data.steps[u.cursor.idx]);
    else return;
    event.preventDefault();
  });
  const title = make("h2", {}, make("code", {}, chart.name));
  return [make("figure", {}, make("figcaption", {}, title, chart.meaning), box), box];
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
  const seeds = new Set(data.runs.map((run) => run.variant)).size < data.runs.length;
  $("seeds").parentElement.hidden = !seeds;
  $("band").textContent = seeds
    ? "Runs that differ in their seed: mean and its 95 % interval (Student)."
    : "";
  if (!data.charts.length) $("charts").textContent = "No metrics yet.";
}
