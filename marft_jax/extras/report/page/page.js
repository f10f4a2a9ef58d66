"use strict";
// What the page does beyond text; this file is the last to run: helpers, views, keys, the start.
// Whatever a model wrote is moved as nodes or set as textContent; no string ever becomes markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "text", "g", "title"].includes(tag);
  const node = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- views: one at a time, named by the address
const views = all("main > section");
const links = all("header.top nav a");

let view = views[0]; // the one that is shown

function visit() {
  const target = $(location.hash.slice(1));
  view = views.find((v) => target && v.contains(target)) || view;
  for (const v of views) v.hidden = v !== view;
  for (const link of links) {
    const here = link.hash === "#" + view.id;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  for (let node = target; node && node !== view; node = node.parentElement)
    if (node.localName === "details") node.open = true;
  if (view.id === "curves") draw();
  if (view.querySelector(".chapter") && !view.contains($("toolbar")))
    view.querySelector("h1").after($("toolbar"), $("list"));
  const chapter = view.querySelector(".chapter:not([hidden])");
  if (chapter && !view.querySelector(".chapter[open]")) {
    chapter.open = true;
    const group = chapter.querySelector(".group:not([hidden])");
    if (group) group.open = true;
  }
  if (view.querySelector(".chapter")) sift();
  if (target && target !== view && view.contains(target)) focusOn(target);
  else if (target === view) window.scrollTo(0, 0);
}

function focusOn(details) {
  const summary = details.querySelector(":scope > summary") || details;
  summary.focus();
  summary.scrollIntoView({ block: "start" });
}

// ---- keys
function move(selector, way) {
  const there = all(selector, view).filter((d) => !d.hidden && d.checkVisibility());
  const at = there.findIndex((d) => d.contains(document.activeElement));
  const next =
    there[
      at < 0 ? (way > 0 ? 0 : there.length - 1) : Math.min(Math.max(at + way, 0), there.length - 1)
    ];
  if (!next) return;
  if (at >= 0 && there[at] !== next) there[at].open = false;
  next.open = true;
  focusOn(next);
}

const KEYS = {
  n: () => move(".chapter", 1),
  p: () => move(".chapter", -1),
  j: () => move(".chapter[open] .group", 1),
  k: () => move(".chapter[open] .group", -1),
  "/": () => {
    location.hash = "#dialogues";
    visit();
    $("search").focus();
  },
  t: () => theme(),
  "?": () => $("help").showModal(),
};
for (const [i, link] of links.entries()) KEYS[i + 1] = () => link.click();

function theme() {
  const root = document.documentElement,
    dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme =
    (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  if (!$("curves").hidden) draw();
}

// ---- start
document.documentElement.classList.add("js");
for (const node of all(".scripted, .tools")) node.hidden = false;
document.addEventListener("keydown", (event) => {
  const typing =
    event.target.matches("input:not([type=checkbox]), select, textarea") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey;
  if (typing || $("help").open || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const chapter of all(".chapter"))
  chapter.addEventListener("toggle", () => {
    if (chapter.open) {
      histogram(chapter);
      shade();
      graphs();
    }
  });
for (const group of all(".group"))
  group.addEventListener("toggle", () => {
    if ($("shade").value || $("diff").checked) shade();
    if ($("graph").checked) graphs();
  });
document.addEventListener("click", (event) => {
  if (event.target.matches(".token")) $("value").textContent = event.target.title;
});
for (const [id, event, act] of [
  ["search", "input", sift],
  ["filter", "change", sift],
  ["shade", "change", shade],
  ["side", "change", graphs],
  ["graph", "change", graphs],
  ["diff", "change", differences],
  ["list", "toggle", listSamples],
  ["smooth", "input", draw],
  ["seeds", "change", draw],
  ["by", "change", draw],
  ["whole", "change", draw],
  ["x", "change", () => ((zoom = null), draw())],
  ["more", "toggle", draw],
  ["theme", "click", theme],
  ["keys", "click", KEYS["?"]],
])
  $(id).addEventListener(event, act);
addEventListener("hashchange", visit);
addEventListener("resize", () => {
  if (!$("curves").hidden) draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!$("curves").hidden) draw();
});
// ---- a page that is served follows its runs: numbers at once, texts when the reader wants to
let last = "";
async function follow() {
  const text = await fetch("state").then((answer) => answer.text(), () => "");
  if (!text) return void ($("news").textContent = "no longer served");
  setTimeout(follow, 2000); // also of a run that ended, for it may be continued
  if (text === last) return;
  const news = JSON.parse((last = text));
  $("news").textContent = `${news.ended ? "ended" : "following"}: ${news.words}`;
  if (news.version !== data.version) {
    if (["runs", "curves"].includes(view.id)) return location.reload();
    const again = make("button", { type: "button" }, "show what is new");
    again.addEventListener("click", () => location.reload());
    $("news").append(" ", again);
  }
}
if (data.version) follow();

shadings();
groupings();
comparisons();
visit();
