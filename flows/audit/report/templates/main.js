// Which page is shown, and the keys.

const CRUMBS = byId("crumbs");
let shownHash = null;

// #/step/8/sample/000008-0003-002?by=gap
function parsed(hash) {
  const [where, query] = hash.replace(/^#\/?/, "").split("?");
  const parts = where.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { parts, query: new URLSearchParams(query || "") };
}

// Some frames allow no change of the address; the page then changes all the same.
function go(hash, replace = false) {
  try {
    if (replace) window.history.replaceState(null, "", hash);
    else window.location.hash = hash;
  } catch { /* shown below */ }
  render(hash);
}

async function render(hash = shownHash) {
  const first = shownHash === null;
  const keep = hash === shownHash || (shownHash && hash.split("?")[0] === shownHash.split("?")[0]);
  shownHash = hash;
  const { parts, query } = parsed(hash);
  const run = await jsonOf("run");
  const focused = keep && document.activeElement ? document.activeElement.dataset.by : null;
  const [kind, number, deeper, id] = parts;
  const index = Number(number);
  const name = kind === "step" ? "step" : ["config", "lineage"].includes(kind) ? kind : "run";
  const view = byId(`view-${name}`);
  if (name === "run" && !view.dataset.drawn) await drawRun(view);
  if (name === "lineage") await drawLineage();
  if (name === "step") {
    if (!run.steps.includes(index)) view.replaceChildren(notInFile(run, number));
    else if (deeper === "group") await drawGroup(view, index, id);
    else if (deeper === "sample") await drawSample(view, index, id, query);
    else await drawStep(view, index);
  }
  if (hash !== shownHash) return;
  for (const one of document.querySelectorAll("main > .view")) one.hidden = one !== view;
  crumbs(run, name, index, deeper, id);
  for (const again of redraw) if (!again()) redraw.delete(again);
  if (focused) view.querySelector(`[data-by="${focused}"]`)?.focus();
  else if (!keep && !first) { window.scrollTo(0, 0); byId("title").focus({ preventScroll: true }); }
  document.body.dataset.ready = hash;
}

function notInFile(run, number) {
  return section(`Step ${number} is not in this file`, `It holds the batches of ${run.steps.length ? `step${run.steps.length > 1 ? "s" : ""} ${run.steps.join(", ")}` : "no step"}. This command puts it in:`,
    command(`grpoflow report ${run.folder} --step ${number}`));
}

function crumbs(run, name, index, deeper, id) {
  const trail = [["#/", run.name]];
  if (name === "config") trail.push(["#/config", "Plan and configuration"]);
  if (name === "lineage") trail.push(["#/lineage", "Lineage"]);
  if (name === "step") trail.push([`#/step/${index}`, `Step ${index}`]);
  if (deeper === "sample") {
    const group = id.replace(/-\d+$/, "");
    trail.push([`#/step/${index}/group/${group}`, `Group ${group}`], [`#/step/${index}/sample/${id}`, `Sample ${id}`]);
  }
  if (deeper === "group") trail.push([`#/step/${index}/group/${id}`, `Group ${id}`]);
  CRUMBS.replaceChildren(...trail.slice(0, -1).flatMap(([href, text]) => [h("a", { href }, text), h("span", { class: "quiet", "aria-hidden": "true" }, "/")]));
  const title = name === "run" ? run.name : trail[trail.length - 1][1];
  byId("title").textContent = title;
  document.title = `${title}${name === "run" ? "" : ` · ${run.name}`} · grpoflow`;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.tab === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function parent() {
  const { parts } = parsed(shownHash);
  const [kind, index, deeper, id] = parts;
  if (deeper === "sample") return `#/step/${index}/group/${id.replace(/-\d+$/, "")}`;
  if (deeper === "group") return `#/step/${index}`;
  return kind ? "#/" : null;
}

function visibleIn(selector) {
  return [...document.querySelectorAll(selector)].find((one) => one.offsetParent !== null);
}

function neighbour(by) {
  const { parts } = parsed(shownHash);
  if (parts[2] === "sample") return visibleIn(`[data-go="${by > 0 ? "after" : "before"}"]`)?.click();
  const items = visibleIn(".view:not([hidden]) .card") ? ".view:not([hidden]) .card" : ".view:not([hidden]) tr.row";
  const all = [...document.querySelectorAll(items)].filter((one) => one.offsetParent !== null);
  const at = all.indexOf(document.activeElement);
  const to = all[at < 0 ? 0 : at + by];
  if (to) { to.focus(); to.scrollIntoView({ block: "nearest" }); }
  return undefined;
}

async function otherStep(by) {
  const run = await jsonOf("run");
  const { parts } = parsed(shownHash);
  if (parts[0] !== "step") return;
  const to = run.steps[run.steps.indexOf(Number(parts[1])) + by];
  if (to !== undefined) go(`#/step/${to}`);
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const field = event.target.closest("input, select, textarea");
  const help = byId("help");
  if (event.key === "Escape") {
    if (help.open) return;
    if (field) { field.blur(); event.preventDefault(); return; }
    const up = parent();
    if (up) { go(up); event.preventDefault(); }
    return;
  }
  if (field || help.open) return;
  const keys = {
    "/": () => { const search = visibleIn("[data-search]"); if (search) { search.focus(); search.select(); } },
    j: () => neighbour(1), ArrowDown: null,
    k: () => neighbour(-1),
    ArrowRight: () => parsed(shownHash).parts[2] === "sample" && neighbour(1),
    ArrowLeft: () => parsed(shownHash).parts[2] === "sample" && neighbour(-1),
    "[": () => otherStep(-1),
    "]": () => otherStep(1),
    t: () => turnTheme(),
    "?": () => help.showModal(),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

function turnTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  if (parsed(shownHash).parts[2] === "sample") render();
}

byId("theme").addEventListener("click", turnTheme);
byId("keys").addEventListener("click", () => byId("help").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shownHash && parsed(shownHash).parts[2] === "sample") render(); });
byId("config-search").addEventListener("input", (event) => filterConfig(event.target.value, byId("config-differs")?.checked));
byId("config-differs")?.addEventListener("change", (event) => filterConfig(byId("config-search").value, event.target.checked));

function filterConfig(text, differs) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of document.querySelectorAll("#config-rows tr")) {
    const shows = words.every((word) => row.textContent.toLowerCase().includes(word)) && (!differs || row.dataset.differs === "yes");
    row.hidden = !shows;
    count += shows;
  }
  byId("config-count").textContent = `${count} keys`;
}

window.addEventListener("hashchange", () => { if (window.location.hash !== shownHash) render(window.location.hash || "#/"); });
// A link is followed here, because a frame may refuse to change its address.
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#/"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});

if (typeof DecompressionStream === "undefined") {
  byId("needs").hidden = false;
} else {
  document.body.classList.add("live");
  render(window.location.hash || "#/").catch((error) => {
    byId("needs").hidden = false;
    byId("needs").textContent = `This file cannot be read to its end: ${error.message}. Make it again with grpoflow report.`;
    throw error;
  });
}
