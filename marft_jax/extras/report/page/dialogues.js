"use strict";
// Dialogues: histogram, filter and search; shading; the graph of D; a task then and now.

// ---- histogram, filter, search
function binsOf(rewards) {
  const values = [...new Set(rewards)].sort((a, b) => a - b);
  if (values.length <= 10) return values.map((v) => ({ from: v, to: v, closed: true }));
  const low = values[0], high = values.at(-1);
  const edge = (i) => (i === 10 ? high : low + (i * (high - low)) / 10);
  return Array.from({ length: 10 }, (_, i) => ({ from: edge(i), to: edge(i + 1), closed: i === 9 }));
}

const isIn = (bin, r) => r >= bin.from && (r < bin.to || (bin.closed && r === bin.to));

function histogram(chapter) {
  const place = chapter.querySelector(".histogram");
  const rewards = JSON.parse(chapter.dataset.rewards || "[]");
  if (place.children.length || rewards.length < 2) return;
  const bins = binsOf(rewards);
  for (const bin of bins) bin.count = rewards.filter((r) => isIn(bin, r)).length;
  const most = Math.max(...bins.map((bin) => bin.count));
  const bars = bins.map((bin) => barOf(chapter, place, bin, most));
  place.append(make("span", { class: "quiet" }, "rewards"), ...bars);
  place.hidden = false;
}

function barOf(chapter, place, bin, most) {
  const [from, to] = [bin.from, bin.to].map((v) => String(Number(v.toPrecision(3))));
  const name = from === to ? from : `${from} to ${to}`;
  const title = `reward ${name}: ${bin.count} episodes`;
  const bar = make("button", { type: "button", "aria-pressed": "false", title },
    make("i", { style: `height:${(32 * bin.count) / most + 1}px` }), name, make("small", {}, bin.count));
  bar.addEventListener("click", () => {
    const on = bar.getAttribute("aria-pressed") !== "true";
    for (const other of all("button", place))
      other.setAttribute("aria-pressed", String(on && other === bar));
    chapter.bin = on ? bin : null;
    sift();
  });
  return bar;
}

const words = new WeakMap();
function wordsOf(group) {
  if (!words.has(group))
    words.set(
      group,
      all(".task, .whole, .action, .tool .text", group)
        .map((n) => n.textContent)
        .join("\n")
        .toLowerCase(),
    );
  return words.get(group);
}

function sift() {
  const search = $("search").value.toLowerCase(),
    flag = $("filter").value;
  const sifted = search || flag || all(".chapter").some((chapter) => chapter.bin);
  let tasks = 0, steps = 0;
  for (const chapter of all(".chapter")) {
    const groups = all(".group", chapter);
    let hits = 0;
    for (const group of groups) {
      const rewards = all(".episode", group).map((e) => Number(e.dataset.reward));
      const inBin = !chapter.bin || rewards.some((r) => isIn(chapter.bin, r));
      const fits =
        inBin &&
        (!flag || group.dataset.flags.split(" ").includes(flag)) &&
        (!search || wordsOf(group).includes(search));
      group.hidden = !fits;
      hits += fits;
    }
    chapter.querySelector(".hits").textContent =
      hits < groups.length ? `${hits} of ${groups.length} tasks match` : "";
    chapter.hidden = Boolean(sifted && !hits && !chapter.bin); // its histogram frees it again
    if (view.contains(chapter) && hits) [tasks, steps] = [tasks + hits, steps + 1];
  }
  $("hits").textContent = sifted ? `${tasks} tasks in ${steps} places match` : "";
  listSamples();
}

// ---- shading
function spread(turns, value) {
  let most = 0;
  for (const turn of turns) for (const v of value(turn)) most = Math.max(most, Math.abs(v));
  return most || 1;
}

function tint(node, name, value, most) {
  // of a log-prob the chance that another token came; of others the share of the largest
  const strength = name === "log-prob" ? 1 - Math.exp(value) : Math.abs(value) / most;
  const share = Math.round(60 * Math.min(strength, 1));
  const colour = value < 0 ? "--low" : "--high";
  node.style.background = `color-mix(in srgb, var(${colour}) ${share}%, transparent)`;
  node.title = `${name} ${Number(value.toPrecision(4))}`;
}

const tokensOf = (turn) => JSON.parse(turn.dataset.tokens || "{}");

function shade() {
  const name = $("shade").value,
    own = $("shade").selectedOptions[0].dataset.tokens;
  $("value").textContent = name && own ? "tap a token for its value" : "";
  let largest = 0;
  for (const chapter of all(".chapter[open]")) {
    const turns = all(".turn", chapter),
      most = spread(turns, (turn) =>
        own ? tokensOf(turn)[name] || [] : [Number(turn.dataset[name] || 0)],
      );
    largest = Math.max(largest, most);
    for (const turn of turns)
      if (turn.closest(".group").open) shadeTurn(turn, name, own, most);
  }
  scale(name, largest);
  differences();
}

// What the darkest shades stand for; each step has its own where the page shows several.
function scale(name, most) {
  const place = $("scale");
  place.hidden = !name;
  if (!name) return;
  const ends = name === "log-prob" ? ["unlikely", "certain"] : [`−${figure(most)}`, `+${figure(most)}`];
  const bar = make("i", { class: name === "log-prob" ? "chance" : "" });
  const several = all(".chapter[open]", view).length > 1 ? ", at most, of each open step" : "";
  place.replaceChildren(ends[0], bar, ends[1] + several);
}

function shadeTurn(turn, name, own, most) {
  const action = turn.querySelector(".action");
  action.removeAttribute("title");
  action.style.background = "";
  if (action.children.length) action.textContent = action.textContent;
  if (!name) return;
  if (!own) {
    if (turn.dataset[name] !== undefined) tint(action, name, Number(turn.dataset[name]), most);
    return;
  }
  const { lengths, [name]: values } = tokensOf(turn);
  if (!values) return;
  const letters = Array.from(action.textContent),
    spans = [];
  let start = 0;
  lengths.forEach((length, i) => {
    const span = make("span", { class: "token" }, letters.slice(start, (start += length)).join(""));
    tint(span, name, values[i], most);
    spans.push(span);
  });
  action.replaceChildren(...spans, letters.slice(start).join(""));
}

function shadings() {
  for (const name of data.shades.turns)
    $("shade").append(make("option", { value: name }, `${name} of the turn`));
  for (const name of data.shades.tokens)
    $("shade").append(make("option", { value: name, "data-tokens": "1" }, `${name} of each token`));
}

// ---- the graph of D: a column for each distance from the start
function graphOf(episode) {
  const turns = all(".turn", episode),
    depth = [],
    rows = [],
    used = [];
  const sees = turns.map((turn, i) =>
    turn.dataset.sees
      .split(" ")
      .filter(Boolean)
      .map(Number)
      .filter((j) => j < i),
  );
  turns.forEach((_, i) => {
    depth[i] = Math.max(-1, ...sees[i].map((j) => depth[j])) + 1;
    rows[i] = used[depth[i]] = (used[depth[i]] ?? -1) + 1;
  });
  const x = (i) => 50 + 164 * depth[i],
    y = (i) => 24 + 40 * rows[i];
  const width = 100 + 164 * Math.max(0, ...depth),
    height = 48 + 40 * Math.max(0, ...rows);
  const svg = make("svg", {
    class: "graph",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": turns
      .map(
        (t, i) =>
          `turn ${i + 1} ${t.dataset.agent} sees ${sees[i].map((j) => j + 1).join(", ") || "none"}`,
      )
      .join("; "),
  });
  sees.forEach((js, i) =>
    js.forEach((j) =>
      svg.append(
        make("path", {
          d: `M${x(j) + 48} ${y(j)}C${x(j) + 82} ${y(j)} ${x(i) - 82} ${y(i)} ${x(i) - 54} ${y(i)}`,
        }),
        make("path", { class: "head", d: `M${x(i) - 48} ${y(i)}l-9 -4.5v9z` }),
      ),
    ),
  );
  turns.forEach((turn, i) => {
    const name = turn.dataset.agent,
      short = name.length > 9 ? name.slice(0, 8) + "…" : name;
    const node = make(
      "g",
      { class: [...turn.classList].find((c) => /^c\d$/.test(c)) },
      make("title", {}, name),
      make("text", { x: x(i), y: y(i) + 4 }, `${i + 1} ${short}`),
    );
    node.prepend(make("path", { class: "node", d: `M${x(i) - 48} ${y(i) - 14}h96v28h-96z` }));
    node.addEventListener("click", () => {
      turn.scrollIntoView({ block: "center" });
      turn.animate([{ outline: "3px solid var(--accent)" }, {}], 1200);
    });
    svg.append(node);
  });
  return make("div", { class: "graphs" }, svg);
}

const MEANING = "D: an arrow leads from an action to each agent that was shown it.";

function graphs() {
  document.body.classList.toggle("stacked", !$("side").checked);
  for (const group of all(".group")) {
    const shown = $("graph").checked && group.open;
    group.querySelector(".meaning")?.remove();
    if (shown) group.querySelector(".members").before(make("p", { class: "quiet meaning" }, MEANING));
    for (const episode of all(".episode", group)) {
      const old = episode.querySelector(".graphs");
      if (!shown) old?.remove();
      else if (!old) episode.querySelector(".turns").before(graphOf(episode));
    }
  }
}

// ---- differences: words that another sample has not, by the longest common subsequence
const MOST_WORDS = 2000;

function unlike(words, others) {
  const rows = Array.from({ length: words.length + 1 }, () => new Uint16Array(others.length + 1));
  for (let i = words.length - 1; i >= 0; i--)
    for (let j = others.length - 1; j >= 0; j--)
      rows[i][j] = words[i] === others[j] ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
  const found = new Set();
  for (let i = 0, j = 0; i < words.length; ) {
    if (words[i] === others[j]) i++, j++;
    else if (j < others.length && rows[i][j + 1] > rows[i + 1][j]) j++;
    else found.add(i++);
  }
  return found;
}

function mark(episode, other) {
  const theirs = other ? all(".action", other) : [];
  for (const [i, action] of all(".action", episode).entries()) {
    if (action.querySelector("mark")) action.textContent = action.textContent;
    if (!theirs[i]) continue;
    const [pieces, others] = [action, theirs[i]].map((n) => n.textContent.split(/(?<=\s)(?=\S)/));
    const trimmed = [pieces, others].map((p) => p.slice(0, MOST_WORDS).map((w) => w.trimEnd()));
    const own = unlike(...trimmed);
    if (own.size)
      action.replaceChildren(...pieces.map((p, n) => (own.has(n) ? make("mark", {}, p) : p)));
  }
}

function differences() {
  for (const group of all(".group[open]")) {
    const [first, ...rest] = all(".episode", group);
    for (const episode of rest) mark(episode, $("diff").checked ? first : null);
  }
}

// ---- all samples of the view that fit, as one list, sorted by a column
const sum = (turns, name) => turns.reduce((total, turn) => total + Number(turn.dataset[name] || 0), 0);
const COLUMNS = {
  place: (e) => e.closest(".chapter").dataset.title,
  task: (e) => e.closest(".group").querySelector(".task").textContent.slice(0, 80),
  reward: (e) => Number(e.dataset.reward),
  advantage: (e) => sum(all(".turn", e), "advantage") / (all(".turn", e).length || 1),
  tokens: (e) => sum(all(".turn", e), "size"),
  characters: (e) => all(".action", e).reduce((total, n) => total + n.textContent.length, 0),
};
const MOST_ROWS = 500;
const order = { column: "", way: 1 };

function listSamples() {
  if (!$("list").open) return;
  const episodes = all(".chapter:not([hidden]) .group:not([hidden]) .episode", view);
  const flag = $("filter").value, ofOne = ["right", "wrong", "failed"].includes(flag);
  const fit = episodes.filter((e) => !ofOne || e.querySelector(".pill").matches("." + flag));
  const rows = fit.map((e) => ({ e, cells: Object.values(COLUMNS).map((of) => of(e)) }));
  const at = Object.keys(COLUMNS).indexOf(order.column);
  if (at >= 0)
    rows.sort((a, b) => order.way * (a.cells[at] > b.cells[at] ? 1 : a.cells[at] < b.cells[at] ? -1 : 0));
  const headings = Object.keys(COLUMNS).map((name) => {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      order.way = order.column === name ? -order.way : -1; // the largest first
      order.column = name;
      listSamples();
    });
    const sorted = order.column === name ? { "aria-sort": order.way > 0 ? "ascending" : "descending" } : {};
    return make("th", { scope: "col", ...sorted }, button);
  });
  $("list").querySelector("thead tr").replaceChildren(...headings);
  $("list").querySelector("tbody").replaceChildren(...rows.slice(0, MOST_ROWS).map(rowOf));
  $("list").querySelector("summary").textContent =
    `All samples as a list: ${Math.min(rows.length, MOST_ROWS)} of ${rows.length}`;
}

function rowOf({ e, cells: [place, task, ...numbers] }) {
  return make("tr", {}, make("td", {}, make("a", { href: `#${e.id}` }, place)), make("td", {}, task),
    ...numbers.map((v) => make("td", { class: "n" }, Number(v.toPrecision(4)))));
}

// ---- then and now
const places = new Map(); // task to the links of its places
function compare() {
  const some = places.get($("task").selectedOptions[0]);
  const columns = [$("left"), $("right")].map((select) => {
    const link = some[Number(select.value)];
    const members = $(link.hash.slice(1)).querySelector(".members").cloneNode(true);
    for (const node of all("[id]", members)) node.removeAttribute("id");
    return make(
      "div",
      {},
      make("h2", {}, make("a", { href: link.hash }, link.textContent)),
      members,
    );
  });
  $("pair").replaceChildren(...columns);
  const [then, now] = columns.map((column) => all(".episode", column));
  if ($("changes").checked)
    then.forEach((episode, i) => now[i] && (mark(episode, now[i]), mark(now[i], episode)));
}

function comparisons() {
  for (const item of all(".repeated li")) {
    const option = make("option", {}, item.querySelector(".text").textContent.slice(0, 120));
    places.set(option, Object.assign(all("a", item), item.dataset));
    $("task")?.append(option);
  }
  if (!places.size) return;
  const offer = () => {
    const some = places.get($("task").selectedOptions[0]);
    for (const [select, at] of [
      [$("left"), some.then],
      [$("right"), some.now],
    ]) {
      select.replaceChildren(
        ...some.map((link, i) => make("option", { value: i }, link.textContent)),
      );
      select.value = String(at);
    }
    compare();
  };
  $("task").addEventListener("change", offer);
  for (const id of ["left", "right", "changes"]) $(id).addEventListener("change", compare);
  offer();
}
