// A sample's page: its tokens coloured by one column, with all values of the token under the pointer or the focus.

const CHUNK = 6000;  // tokens drawn at once

// kind `signed`: orange below its middle, blue above; `amount`: from nothing to much.
const TOKEN_COLUMNS = [
  { key: "advantage", label: "Advantage", kind: "signed", about: "what the loss multiplies the token's ratio by" },
  { key: "gap", label: "Gap", unit: "nats", kind: "signed", about: "rollout minus old log-prob: what the engine said of the token it sampled, minus what the trainer computes with the same weights. Only numerics should keep it from 0" },
  { key: "ratio", label: "Ratio", kind: "signed", middle: 1, about: "exp(old − rollout): trainer's over engine's probability, which rollout correction weighs by. The loss's ratio, new over old policy, exists only while an update runs; its largest value and clip fraction are with the step's optimizer steps" },
  { key: "entropy", label: "Entropy", unit: "nats", kind: "amount", about: "of the policy's distribution at this token" },
  { key: "kl", label: "KL", unit: "nats", kind: "amount", about: "k3 estimate of the KL of the policy before the step to the reference: exp(ref − old) − 1 − (ref − old)" },
  { key: "log_prob", label: "Log-prob", unit: "nats", kind: "amount", low: true, about: "natural log of the probability under the policy before the step; unlikely tokens are dark" },
  { key: "mask", label: "Loss mask", kind: "flag", about: "1: the token takes part in the loss" },
  { key: "is_weight", label: "Correction weight", kind: "signed", middle: 1, about: "importance weight of rollout correction" },
  { key: "token_reward", label: "Reward", kind: "signed", about: "reward of the token, after KL where KL is in the reward" },
  { key: "return", label: "Return", kind: "signed", about: "sum of the rewards from this token on" },
];

const RAMPS = {
  light: { page: [255, 255, 255], low: [[176, 84, 4]], high: [[27, 98, 178]], amount: [[228, 240, 186], [118, 198, 144], [38, 130, 142], [68, 24, 96]] },
  dark: { page: [21, 24, 30], low: [[240, 146, 70]], high: [[96, 160, 245]], amount: [[58, 48, 110], [38, 112, 142], [70, 190, 112], [250, 230, 60]] },
};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function between(stops, t) {
  const place = Math.max(0, Math.min(1, t)) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  return stops[i].map((from, channel) => Math.round(from + (stops[i + 1][channel] - from) * (place - i)));
}

// Colour of a value from -1 to 1, or from 0 to 1, and a text colour that is read on it.
function shade(kind, t) {
  const ramp = RAMPS[isDark() ? "dark" : "light"];
  const rgb = kind === "signed" ? between([ramp.page, ...(t < 0 ? ramp.low : ramp.high)], Math.abs(t)) : between([ramp.page, ...ramp.amount], t);
  const light = rgb.map((one) => { const c = one / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  const luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  return { ground: `rgb(${rgb})`, ink: luminance > 0.179 ? "#000000" : "#ffffff" };
}

function distance(column, value) {
  if (column.key === "ratio" || column.key === "is_weight") return Math.log(value);
  return column.low ? -value : value;
}

// What full colour stands for: the 99.5th percentile of the distances, so that one outlier does not wash out the rest.
function fullScale(column, values, from, to) {
  const found = [];
  const hop = Math.max(1, Math.floor((to - from) / 20000));
  for (let i = from; i < to; i += hop) {
    const size = Math.abs(distance(column, values[i]));
    if (Number.isFinite(size)) found.push(size);
  }
  found.sort((a, b) => a - b);
  return found.length ? found[Math.floor((found.length - 1) * 0.995)] || found[found.length - 1] : 0;
}

function pieceText(piece) {
  if (Array.isArray(piece.text)) return `⟨${piece.text.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}⟩`;
  if (piece.text === null || piece.text === "") return `⟨${piece.id}⟩`;
  return shown(piece.text).replace(/ /g, "·").replace(/\t/g, "⇥").replace(/\n/g, "⏎");
}

function present(step, tokens) {
  const list = TOKEN_COLUMNS.filter((column) => tokens[column.key]);
  if (tokens.mask) tokens.mask_numbers = tokens.mask;
  return list;
}

async function drawSample(view, index, id, query) {
  const step = await stepOf(index);
  const row = step.samples ? step.rowOf.get(id) : undefined;
  if (row === undefined) { view.replaceChildren(empty(`Step ${index} has no sample ${id}.`)); return; }
  const tokens = await tokensOf(step);
  const columns = present(step, tokens);
  const memory = once("token view", () => ({ by: null, scale: "step", k: 10, values: false }));
  const wanted = query.get("by") || memory.by;
  const column = columns.find((one) => one.key === wanted) || columns[0];
  if (column) memory.by = column.key;
  const about = step.samples.groups[step.samples.columns.group_id[row]];
  const sample = { step, tokens, row, id, columns, column, memory, from: step.starts[row], to: step.starts[row + 1] };
  view.replaceChildren(sampleFacts(sample, about), promptBlock(about, true), tokenBlock(sample));
}

function sampleFacts({ step, row, id }, about) {
  const { columns, parts } = step.samples;
  const get = (name) => (columns[name] ? columns[name][row] : null);
  const names = Object.keys(parts);
  const siblings = order(step);
  const at = siblings.indexOf(row);
  const link = (place, label, sign) => (siblings[place] === undefined ? h("span", { class: "quiet off" }, label)
    : h("a", { href: `#/step/${step.index}/sample/${columns.sample_id[siblings[place]]}`, "data-go": sign }, label));
  return h("div", { class: "summary" }, facts([
    ["Score", num(get("score"))],
    ...(names.length > 1 ? names.map((name) => [name, num(parts[name][row])]) : []),
    ["Advantage", get("advantage") === null ? "–" : signed(get("advantage")), "mean over the tokens"],
    ["Answer", get("extracted") === null ? "–" : shownShort(get("extracted"), 60)],
    ["Truth", shownShort(truthOf(about) ?? "–", 60)],
    ["Tokens", num(get("length"))],
    ["End", get("finish_reason") ?? "–"],
    get("status") && get("status") !== "ok" ? ["Status", `! ${get("status")}`] : null,
    get("message") ? ["Message", shownShort(get("message"), 200)] : null,
    get("no_signal") ? ["No signal", get("no_signal")] : null,
    ["Group", h("a", { href: `#/step/${step.index}/group/${get("group_id")}` }, get("group_id"))],
  ]), h("nav", { class: "steps", "aria-label": "Samples" }, link(at - 1, "← Previous (k)", "before"), h("span", { class: "quiet" }, `${at + 1} of ${siblings.length}`), link(at + 1, "Next (j) →", "after")));
}

// Samples in the order of the table, as it is filtered and sorted; all, when this one is not in it.
function order(step) {
  const state = once(`samples ${step.index}`, () => ({}));
  return state.order && state.order.length ? state.order : [...Array(step.count).keys()];
}

function tokenBlock(sample) {
  const { step, tokens, columns, column, memory, from, to } = sample;
  if (to === from) return section("Tokens", null, empty("The response is empty."));
  const place = h("div", { class: `tokens${memory.values ? " with-values" : ""}`, role: "listbox", "aria-label": column ? `Response tokens, coloured by ${column.label}` : "Response tokens" });
  const detail = h("div", { class: "detail", "aria-live": "off" });
  const side = h("aside", { class: "side", "aria-label": "Values" });
  const pick = h("div", { class: "bys", role: "radiogroup", "aria-label": "Colour tokens by" }, columns.map((one) => h("button", {
    type: "button", role: "radio", tabindex: one === column ? 0 : -1, "aria-checked": String(one === column), title: one.about, "data-by": one.key,
    onclick: () => go(`#/step/${step.index}/sample/${sample.id}?by=${one.key}`, true) }, one.label)));
  roving(pick, "button");
  const spread = column ? fullScale(column, tokens[column.key], ...(memory.scale === "step" ? [0, step.starts[step.count]] : [from, to])) : 0;
  const controls = h("div", { class: "bar-row" }, pick);
  const missing = TOKEN_COLUMNS.filter((one) => !tokens[one.key] && !["is_weight", "token_reward", "return"].includes(one.key)).map((one) => one.label);
  const noted = [];
  if (missing.length) noted.push(h("p", { class: "flagged" }, `Missing in this step: ${missing.join(", ")}.`));
  if (step.no_texts) noted.push(h("p", { class: "flagged" }, `Token ids are shown instead of texts: ${step.no_texts}.`));
  const paint = drawTokens(sample, place, spread);
  const show = (at) => detail.replaceChildren(detailOf(sample, at));
  place.addEventListener("pointerover", (event) => { const token = event.target.closest(".token"); if (token) show(Number(token.dataset.at)); });
  place.addEventListener("focusin", (event) => {
    const token = event.target.closest(".token");
    if (!token) return;
    const at = Number(token.dataset.at);
    show(at);
    say(wordsOf(sample, at));
  });
  roving(place, ".token");
  show(from);
  side.append(detail, largest(sample, (at) => { paint.upTo(at); const token = place.querySelector(`[data-at="${at}"]`); token.focus(); token.scrollIntoView({ block: "center" }); }));
  const check = (label, key, on, off) => h("label", { class: "pick" }, h("input", { type: "checkbox", checked: memory[key] === on, onchange: (event) => { memory[key] = event.target.checked ? on : off; render(); } }), label);
  controls.append(check("values", "values", true, false), check("scale of the whole step", "scale", "step", "response"));
  return section("Tokens", column ? column.about : "No column can be shown.", controls, ...noted, column ? legend(sample, spread) : null, h("div", { class: "token-page" }, h("div", {}, place, paint.more), side));
}

function drawTokens(sample, place, spread) {
  const { tokens, column, memory, from, to } = sample;
  const values = column ? tokens[column.key] : null;
  let drawnTo = from;
  const more = h("div");
  const upTo = (at) => {
    while (drawnTo <= at && drawnTo < to) {
      const fragment = document.createDocumentFragment();
      const end = Math.min(to, drawnTo + CHUNK);
      for (; drawnTo < end; drawnTo++) {
        fragment.append(tokenSpan(sample, drawnTo, values, spread));
        if (String(tokens.vocabulary[tokens.ids[drawnTo]].text).includes("\n")) fragment.append(document.createElement("br"));
      }
      place.append(fragment);
    }
    more.replaceChildren(...(drawnTo < to ? [h("button", { type: "button", onclick: () => upTo(drawnTo) }, `Show ${num(Math.min(CHUNK, to - drawnTo))} more of ${num(to - drawnTo)} tokens`)] : []));
  };
  upTo(from);
  return { more, upTo };
}

function tokenSpan({ tokens, column, memory }, at, values, spread) {
  const piece = tokens.vocabulary[tokens.ids[at]];
  const span = document.createElement("span");
  span.className = "token";
  span.setAttribute("role", "option");
  span.tabIndex = -1;
  span.dataset.at = at;
  span.textContent = pieceText(piece);
  if (piece.special) span.classList.add("special");
  if (tokens.mask && !tokens.mask[at]) span.classList.add("masked");
  if (!column) return span;
  const value = values[at];
  const t = column.kind === "flag" ? (value ? 0.35 : 0) : spread ? distance(column, value) / spread : 0;
  if (Number.isFinite(t) && Math.abs(t) > 0.02) {
    const { ground, ink } = shade(column.kind === "flag" ? "amount" : column.kind, Math.max(-1, Math.min(1, t)));
    span.style.backgroundColor = ground;
    span.style.color = ink;
    if (column.kind === "signed") span.classList.add(t < 0 ? "under" : "over");
  }
  if (memory.values) {
    const small = document.createElement("small");
    small.textContent = num(value, 3);
    span.append(small);
  }
  return span;
}

function legend({ column, memory }, spread) {
  if (column.kind === "flag") return h("p", { class: "quiet legend" }, "Tokens that are left out of the loss are struck through.");
  if (!spread) return h("p", { class: "quiet legend" }, `${column.label} is ${num(column.middle || 0)} at every token.`);
  const end = (t) => num(column.middle ? Math.exp(t * spread) : column.low ? -t * spread : t * spread, 3);
  const swatches = [];
  for (let i = 0; i <= 10; i++) {
    const t = column.kind === "signed" ? i / 5 - 1 : i / 10;
    const box = h("i");
    box.style.backgroundColor = shade(column.kind, t).ground;
    swatches.push(box);
  }
  const signs = column.kind === "signed" ? h("span", { class: "quiet" }, "dashed underline: below ", num(column.middle || 0), ", solid: above") : null;
  return h("div", { class: "legend", role: "img", "aria-label": `Colours from ${end(column.kind === "signed" ? -1 : 0)} to ${end(1)} ${column.unit || ""}` },
    h("span", {}, `${column.kind === "signed" ? "≤ " : ""}${end(column.kind === "signed" ? -1 : 0)}`), h("span", { class: "ramp" }, swatches), h("span", {}, `${column.low ? "≤" : "≥"} ${end(1)} ${column.unit || ""}`),
    signs, h("span", { class: "quiet" }, memory.scale === "step" ? "scale of the whole step" : "scale of this response"));
}

function wordsOf({ tokens, column, from }, at) {
  const text = pieceText(tokens.vocabulary[tokens.ids[at]]);
  return `token ${at - from}: ${text}${column ? `, ${column.label} ${num(tokens[column.key][at])}` : ""}`;
}

function detailOf({ tokens, columns, column, from, to }, at) {
  const piece = tokens.vocabulary[tokens.ids[at]];
  const value = (key) => (tokens[key] ? tokens[key][at] : null);
  const rollout = tokens.gap ? value("log_prob") + value("gap") : null;
  const ref = tokens.ref_gap ? value("log_prob") - value("ref_gap") : null;
  const rows = columns.map((one) => [one.label, num(value(one.key)), one.unit, one === column]);
  const after = rows.findIndex(([label]) => label === "Log-prob") + 1;
  if (rollout !== null) rows.splice(after, 0, ["… by engine", num(rollout), "nats"]);
  if (ref !== null) rows.splice(after + (rollout !== null), 0, ["… by reference", num(ref), "nats"]);
  if (tokens.log_prob) rows.splice(after, 0, ["Probability", num(Math.exp(value("log_prob"))), ""]);
  return h("div", {}, h("p", { class: "which" }, h("span", { class: "quiet" }, `token ${num(at - from)} of ${num(to - from)}`), h("code", { class: "piece" }, pieceText(piece).trimEnd()), h("span", { class: "quiet" }, `id ${piece.id}${piece.special ? " · special" : ""}`)),
    h("table", { class: "values" }, h("tbody", {}, rows.map(([label, text, unit, chosen]) => h("tr", { class: chosen ? "chosen" : "" }, h("th", { scope: "row" }, label), h("td", { class: "number" }, text), h("td", { class: "quiet" }, unit || ""))))));
}

function largest(sample, jump) {
  const { tokens, column, memory, from, to } = sample;
  if (!column || column.kind === "flag") return null;
  const values = tokens[column.key];
  const name = column.low ? "Lowest" : column.kind === "signed" ? "Farthest from " + num(column.middle || 0) : "Largest";
  const list = h("ol", { class: "largest" });
  const draw = () => {
    const places = [];
    for (let at = from; at < to; at++) if (Number.isFinite(values[at])) places.push(at);
    const size = (at) => (column.kind === "signed" ? Math.abs(distance(column, values[at])) : distance(column, values[at]));
    places.sort((a, b) => size(b) - size(a) || a - b);
    const same = places.length > 1 && places.every((at) => values[at] === values[places[0]]);
    list.replaceChildren(...(same ? [h("li", { class: "quiet same" }, `${num(values[places[0]])} at every token`)] : places.slice(0, memory.k).map((at) => h("li", {}, h("button", { type: "button", tabindex: -1, onclick: () => jump(at), "aria-label": `go to ${wordsOf(sample, at)}` },
      h("span", { class: "quiet place" }, at - from), h("code", {}, shownShort(pieceText(tokens.vocabulary[tokens.ids[at]]), 16)), h("span", { class: "number" }, column.kind === "signed" && !column.middle ? signed(values[at]) : num(values[at])))))));
    list.querySelector("button")?.setAttribute("tabindex", "0");
  };
  draw();
  roving(list, "button");
  return h("div", { class: "most" }, h("h3", {}, name, h("label", { class: "pick" }, h("span", { class: "away" }, "how many"), h("input", { type: "number", min: 1, max: 200, value: memory.k, onchange: (event) => { memory.k = Math.max(1, Math.min(200, Number(event.target.value) || 10)); draw(); } }))), list);
}
