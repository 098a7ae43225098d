// Elements and numbers as text. Everything from the run is set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

function say(text) {
  byId("live").textContent = text;
}

function minus(text) {
  return text.replace(/-/g, "−");
}

// A number for reading: 4 significant digits, a true minus; a dash where there is none.
function num(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return minus(value.toLocaleString("en-US"));
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return minus(value.toExponential(digits - 2));
  if (size >= 1000) return minus(value.toLocaleString("en-US", { maximumFractionDigits: 1 }));
  return minus(value.toPrecision(digits));
}

function signed(value, digits = 4) {
  return (value > 0 ? "+" : "") + num(value, digits);
}

// One format for a column, so that its decimal points stand below one another.
function columnFormat(values) {
  let top = 0;
  let whole = true;
  for (const value of values) {
    if (typeof value !== "number" || !Number.isFinite(value)) continue;
    top = Math.max(top, Math.abs(value));
    whole = whole && Number.isInteger(value);
  }
  if (whole) return (value) => num(value);
  if (top < 0.005) {
    return (value) => (typeof value === "number" && Number.isFinite(value) ? minus(value.toExponential(2)) : num(value));
  }
  const places = top >= 1000 ? 1 : top >= 100 ? 2 : 3;
  return (value) => (typeof value === "number" && Number.isFinite(value) ? minus(value.toFixed(places)) : num(value));
}

function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  let value = bytes;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place ? value.toPrecision(3) : value} ${units[place]}`;
}

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toPrecision(3)} ms`;
  return seconds < 120 ? `${seconds.toPrecision(3)} s` : `${(seconds / 60).toFixed(1)} min`;
}

// Control, zero-width and bidirectional characters by name, so that nothing in a response hides or reorders text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\uffff]/g;

function shown(text) {
  return text.replace(HIDDEN, (letter) => {
    const code = letter.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "␡";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function shownShort(text, length) {
  const flat = shown(text.slice(0, length + 1)).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return text.length > length ? `${flat.slice(0, length)}…` : flat;
}

// One stop of the Tab key for many things; arrows, Home and End move among them.
function roving(container, selector, { columns = false, change = null } = {}) {
  const items = () => [...container.querySelectorAll(selector)];
  const first = container.querySelector(selector);
  if (first) first.setAttribute("tabindex", "0");
  const move = (from, to) => {
    if (!to) return;
    if (from) from.setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  };
  container.addEventListener("focusin", (event) => {
    const item = event.target.closest(selector);
    if (!item) return;
    for (const other of container.querySelectorAll(`${selector}[tabindex="0"]`)) {
      if (other !== item) other.setAttribute("tabindex", "-1");
    }
    item.setAttribute("tabindex", "0");
    if (change) change(item);
  });
  container.addEventListener("keydown", (event) => {
    const item = event.target.closest(selector);
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = items();
    const place = all.indexOf(item);
    const next = columns ? ["ArrowDown", "j"] : ["ArrowRight", "ArrowDown"];
    const before = columns ? ["ArrowUp", "k"] : ["ArrowLeft", "ArrowUp"];
    let to = null;
    if (next.includes(event.key)) to = all[place + 1];
    else if (before.includes(event.key)) to = all[place - 1];
    else if (event.key === "Home") to = all[0];
    else if (event.key === "End") to = all[all.length - 1];
    else return;
    event.preventDefault();
    event.stopPropagation();
    move(item, to);
  });
}

function section(title, about, ...children) {
  return h("section", { class: "block" },
    h("div", { class: "block-head" }, h("h2", {}, title), about ? h("p", { class: "quiet" }, about) : null),
    ...children);
}

function empty(text) {
  return h("p", { class: "empty" }, text);
}

function command(text) {
  return h("code", { class: "command" }, text);
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter((pair) => pair).map(([name, value, title]) =>
    h("div", { title }, h("dt", {}, name), h("dd", {}, value))));
}
