// A table over columns: sorted as numbers, filtered by words and comparisons, a page of rows at a time.

const collator = new Intl.Collator("en", { numeric: true });

// `score<0.5 status=error apples`: comparisons with columns, and words that stand somewhere in a row's texts.
function parseFilter(text, columns) {
  const comparisons = [];
  const words = [];
  const unknown = [];
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const found = /^([A-Za-z_][\w./-]*)(<=|>=|!=|=|<|>)(.*)$/.exec(word);
    if (!found) { words.push(word.toLowerCase()); continue; }
    const column = columns.find((one) => one.key.toLowerCase() === found[1].toLowerCase() || one.label.toLowerCase() === found[1].toLowerCase());
    if (!column) { unknown.push(found[1]); continue; }
    comparisons.push({ column, operator: found[2], wanted: found[3] });
  }
  return { comparisons, words, unknown };
}

function compares(value, operator, wanted) {
  if (value === null || value === undefined) return operator === "!=" ? wanted !== "" : operator === "=" && wanted === "";
  const number = Number(wanted);
  const numeric = typeof value === "number" && wanted !== "" && !Number.isNaN(number);
  if (operator === "=" || operator === "!=") {
    const same = numeric ? value === number : String(value).toLowerCase() === wanted.toLowerCase();
    return same === (operator === "=");
  }
  const order = numeric ? value - number : collator.compare(String(value), wanted);
  return operator === "<" ? order < 0 : operator === ">" ? order > 0 : operator === "<=" ? order <= 0 : order >= 0;
}

// Rows in order: by a column, those without a value last, and by their own order where they are equal.
function sorted(rows, column, down) {
  if (!column) return rows;
  const sign = down ? -1 : 1;
  const order = (a, b) => {
    const left = column.values[a];
    const right = column.values[b];
    const none = (left === null || left === undefined) - (right === null || right === undefined);
    if (none || left === null || left === undefined) return none || a - b;
    const both = typeof left === "number" && typeof right === "number";
    return sign * (both ? left - right : collator.compare(String(left), String(right))) || a - b;
  };
  return [...rows].sort(order);
}

// columns: [{key, label, title, values, kind: "number" | "text", cell, off}]; state is kept by the caller between visits.
function dataTable({ caption, columns, count, state, texts, open, hint, numbered, size = 50 }) {
  let haystack = null;
  const holds = (row, word) => {
    haystack = haystack || Array.from({ length: count }, (_, at) => texts.map((list) => list[at] ?? "").join("\n").toLowerCase());
    return haystack[row].includes(word);
  };
  state.off = state.off || new Set(columns.filter((column) => column.off).map((column) => column.key));
  const search = h("input", { type: "search", class: "search", placeholder: hint, "aria-label": `Filter ${caption}`, value: state.filter || "", "data-search": true });
  const told = h("span", { class: "quiet count", role: "status" });
  const body = h("tbody");
  const head = h("tr");
  const pager = h("div", { class: "pager" });
  const formats = new Map(columns.map((column) => [column.key, column.kind === "number" ? columnFormat(column.values) : null]));
  const visible = () => columns.filter((column) => !state.off.has(column.key));

  const header = () => head.replaceChildren(...visible().map((column) => {
    const is = state.sort === column.key;
    return h("th", { scope: "col", class: column.kind === "number" ? "number" : null, "aria-sort": is ? (state.down ? "descending" : "ascending") : "none" },
      h("button", { type: "button", title: column.title, onclick: () => {
        state.down = is ? !state.down : column.kind === "number";
        state.sort = column.key;
        state.page = 0;
        draw();
        head.querySelector(`[data-key="${CSS.escape(column.key)}"]`).focus();
      }, "data-key": column.key }, column.label, h("span", { class: "arrow", "aria-hidden": "true" }, is ? (state.down ? "▼" : "▲") : "")));
  }));

  const row = (index) => h("tr", { tabindex: -1, "data-row": index, class: "row" }, visible().map((column) => {
    const value = column.values[index];
    const cell = h("td", { class: column.kind === "number" ? "number" : null });
    if (column.cell) cell.append(column.cell(index, value) ?? "");
    else if (value === null || value === undefined) cell.append(h("span", { class: "none", title: "no value" }, "–"));
    else cell.textContent = column.kind === "number" ? formats.get(column.key)(value) : shownShort(String(value), 90);
    return cell;
  }));

  const draw = () => {
    const { comparisons, words, unknown } = parseFilter(state.filter || "", columns);
    const left = [];
    for (let index = 0; index < count; index++) {
      if (words.every((word) => holds(index, word))
        && comparisons.every((one) => compares(one.column.values[index], one.operator, one.wanted))) left.push(index);
    }
    state.order = sorted(left, columns.find((column) => column.key === state.sort), state.down);
    const pages = Math.max(1, Math.ceil(left.length / size));
    state.page = Math.min(state.page || 0, pages - 1);
    header();
    body.replaceChildren(...state.order.slice(state.page * size, (state.page + 1) * size).map(row));
    const first = body.querySelector(".row");
    if (first) first.setAttribute("tabindex", "0");
    told.textContent = `${left.length === count ? "" : `${num(left.length)} of `}${num(count)} ${numbered}${unknown.length ? ` · no column ${unknown.join(", ")}` : ""}`;
    pager.hidden = pages === 1;
    const turn = (by, label) => h("button", { type: "button", disabled: state.page + by < 0 || state.page + by >= pages, onclick: () => { state.page += by; draw(); } }, label);
    pager.replaceChildren(turn(-1, "← Previous"), h("span", { class: "quiet" }, `page ${state.page + 1} of ${pages}`), turn(1, "Next →"));
  };

  search.addEventListener("input", () => { state.filter = search.value; state.page = 0; draw(); });
  search.addEventListener("keydown", (event) => {
    const row1 = body.querySelector(".row");
    if (event.key === "ArrowDown" && row1) { row1.focus(); event.preventDefault(); }
  });
  body.addEventListener("click", (event) => {
    const at = event.target.closest(".row");
    if (at && !event.target.closest("a, button") && !String(window.getSelection())) open(Number(at.dataset.row));
  });
  body.addEventListener("keydown", (event) => {
    const at = event.target.closest(".row");
    if (at && event.key === "Enter" && event.target === at) open(Number(at.dataset.row));
  });
  roving(body, ".row", { columns: true });
  draw();
  const choose = h("details", { class: "columns" }, h("summary", {}, "Columns"), h("div", { class: "choices" }, columns.map((column) =>
    h("label", { title: column.title }, h("input", { type: "checkbox", checked: !state.off.has(column.key), onchange: (event) => {
      if (event.target.checked) state.off.delete(column.key); else state.off.add(column.key);
      draw();
    } }), column.label))));
  return h("div", { class: "table-block" },
    h("div", { class: "bar-row" }, search, told, choose),
    h("div", { class: "scroll-x table-place", tabindex: -1 }, h("table", { class: "data" }, h("caption", { class: "away" }, caption), h("thead", {}, head), body)),
    pager);
}
