// A group's page: the responses to one prompt side by side, and where they part.

function pieceBytes(piece) {
  if (Array.isArray(piece.text)) return Uint8Array.from(piece.text);
  return new TextEncoder().encode(piece.text === null || piece.text === "" ? `⟨${piece.id}⟩` : piece.text);
}

// Text of tokens from one place to another; tokens that are parts of a character are joined before they are decoded.
function textOf(tokens, from, to) {
  const chunks = [];
  for (let at = from; at < to; at++) chunks.push(pieceBytes(tokens.vocabulary[tokens.ids[at]]));
  const joined = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
  let end = 0;
  for (const chunk of chunks) { joined.set(chunk, end); end += chunk.length; }
  return shown(new TextDecoder().decode(joined));
}

function commonTokens(ids, a, b) {
  const most = Math.min(a.to - a.from, b.to - b.from);
  let count = 0;
  while (count < most && ids[a.from + count] === ids[b.from + count]) count++;
  return count;
}

// Number of leading tokens of each response that it shares: with all others, or with one.
function sharedWith(tokens, spans, reference) {
  if (reference === null) {
    const all = spans.length > 1 ? Math.min(...spans.slice(1).map((span) => commonTokens(tokens.ids, spans[0], span))) : 0;
    return spans.map(() => all);
  }
  return spans.map((span) => commonTokens(tokens.ids, spans[reference], span));
}

async function drawGroup(view, index, group) {
  const step = await stepOf(index);
  const rows = step.samples && step.rowsOfGroup.get(group);
  if (!rows) { view.replaceChildren(empty(`Step ${index} has no group ${group}.`)); return; }
  const tokens = await tokensOf(step);
  const columns = step.samples.columns;
  const about = step.samples.groups[group];
  const state = once(`group ${index} ${group}`, () => ({ with: "all", by: "sample" }));
  const cards = h("div", { class: "cards" });
  const draw = () => {
    const order = [...rows];
    if (state.by === "score") order.sort((a, b) => (columns.score?.[b] ?? -Infinity) - (columns.score?.[a] ?? -Infinity) || a - b);
    if (state.by === "length") order.sort((a, b) => columns.length[a] - columns.length[b] || a - b);
    const spans = order.map((row) => ({ from: step.starts[row], to: step.starts[row + 1] }));
    const reference = state.with === "all" ? null : order.findIndex((row) => columns.sample_id[row] === state.with);
    const shared = sharedWith(tokens, spans, reference);
    cards.replaceChildren(...order.map((row, i) => card(step, tokens, row, spans[i], shared[i], reference === i, reference !== null)));
    cards.firstChild.setAttribute("tabindex", "0");
  };
  const choose = (label, key, options) => h("label", { class: "pick" }, label, h("select", { onchange: (event) => { state[key] = event.target.value; draw(); } },
    options.map(([value, text]) => h("option", { value, selected: state[key] === value }, text))));
  draw();
  roving(cards, ".card");
  const scores = columns.score ? rows.map((row) => columns.score[row]).filter((score) => typeof score === "number") : [];
  view.replaceChildren(
    h("div", { class: "summary" }, facts([
      ["Responses", num(rows.length)],
      ["Scores", scores.length ? `${num(Math.min(...scores))} to ${num(Math.max(...scores))}` : "–"],
      ["Mean", columns.group_mean ? num(columns.group_mean[rows[0]]) : "–"],
      ["Standard deviation", columns.group_std ? num(columns.group_std[rows[0]]) : "–"],
      ["Truth", shownShort(truthOf(about) ?? "–", 80)],
      about.data_source ? ["Source", shown(about.data_source)] : null,
      columns.no_signal && columns.no_signal[rows[0]] ? ["No signal", columns.no_signal[rows[0]]] : null,
    ])),
    promptBlock(about),
    section("Responses", "Tokens that are shared from the beginning are dim; ▸ marks the first one that differs.",
      h("div", { class: "bar-row" },
        choose("Compare with", "with", [["all", "all others"], ...rows.map((row) => [columns.sample_id[row], columns.sample_id[row]])]),
        choose("Order by", "by", [["sample", "sample"], ["score", "score, best first"], ["length", "length, shortest first"]])),
      cards));
}

function promptBlock(about, small = false) {
  if (!about || about.prompt_text === undefined) return section("Prompt", null, empty("The prompts of this step are missing."));
  return section("Prompt", about.prompt_tokens !== undefined ? `${num(about.prompt_tokens)} tokens` : null, h("pre", { class: small ? "text small" : "text", dir: "auto", tabindex: 0 }, shown(about.prompt_text)));
}

function card(step, tokens, row, span, shared, isReference, compared) {
  const { columns, parts } = step.samples;
  const id = columns.sample_id[row];
  const parted = span.from + shared;
  const text = h("pre", { class: "text response", dir: "auto", tabindex: 0, "aria-label": `Response ${id}` },
    shared ? h("span", { class: "shared", title: `${shared} tokens shared` }, textOf(tokens, span.from, parted)) : null,
    parted < span.to && !isReference && shared > 0 ? h("mark", { class: "parts", title: `token ${shared} differs` }, h("span", { class: "mark-sign" }, "▸"), textOf(tokens, parted, parted + 1)) : null,
    textOf(tokens, parted + (isReference || !shared ? 0 : 1), span.to));
  if (span.to === span.from) text.append(h("span", { class: "quiet" }, "empty response"));
  const names = Object.keys(parts);
  const advantage = columns.advantage ? columns.advantage[row] : null;
  return h("article", { class: "card", tabindex: -1, "data-sample": id, "aria-label": `Sample ${id}, score ${num(columns.score?.[row])}`, onkeydown: (event) => {
    if (event.key === "Enter" && event.target.classList.contains("card")) go(`#/step/${step.index}/sample/${id}`);
  } },
  h("header", {}, h("a", { href: `#/step/${step.index}/sample/${id}` }, id), isReference ? h("span", { class: "quiet" }, " compared with") : null,
    h("span", { class: "score", title: "score" }, num(columns.score ? columns.score[row] : null))),
  facts([
    ["Advantage", advantage === null ? "–" : signed(advantage)],
    ["Answer", columns.extracted ? shownShort(columns.extracted[row] ?? "–", 40) : "–"],
    ["Tokens", num(columns.length[row])],
    ["End", columns.finish_reason ? columns.finish_reason[row] : "–"],
    compared ? ["Shared", `${num(shared)} tokens`] : null,
    ...(names.length > 1 ? names.map((name) => [name, num(parts[name][row])]) : []),
    columns.status && columns.status[row] !== "ok" ? ["Status", `! ${columns.status[row]}`] : null,
  ]), text);
}
