// Charts as inline SVG, drawn at the width of their place and again when it changes.

const redraw = new Set();

function drawn(container, draw) {
  const again = () => {
    if (!container.isConnected) return false;
    const width = Math.floor(container.clientWidth);
    if (width > 0) container.replaceChildren(draw(width));
    return true;
  };
  redraw.add(again);
  queueMicrotask(again);
}

let resizing = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => { for (const again of redraw) if (!again()) redraw.delete(again); });
});

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}

function tickText(value, all) {
  const gap = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value) || 1;
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e5 || gap < 1e-3) return minus(value.toExponential(gap < Math.abs(value) / 10 ? 1 : 0));
  return minus(value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(gap) + 1e-9)) }));
}

function extent(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (low > high) return null;
  if (low === high) { const pad = Math.abs(low) * 0.1 || 0.5; return [low - pad, high + pad]; }
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

function scale(from, to) {
  const factor = (to[1] - to[0]) / (from[1] - from[0] || 1);
  return (value) => to[0] + (value - from[0]) * factor;
}

// Metrics against steps. series: [{name, steps, values, look}]; look is a class from a to d, `other` for the second run.
function lineChart({ title, unit, about, series, inFile, open }) {
  const place = h("div", { class: "chart-place" });
  const read = h("span", { class: "reading" });
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const range = extent(series.map((one) => one.values));
  const figure = h("figure", { class: "chart" },
    h("figcaption", {}, h("h3", { title: about }, title), unit ? h("span", { class: "unit" }, unit) : null, read), place);
  if (!range || !steps.length) {
    place.append(empty("no step has a value"));
    return figure;
  }
  let at = steps.length - 1;
  const valueAt = (one, step) => one.values[one.steps.indexOf(step)];
  const words = (step) => series.map((one) => [one.name, valueAt(one, step)])
    .filter(([, value]) => Number.isFinite(value))
    .map(([name, value]) => (series.length > 1 ? `${name} ${num(value)}` : num(value))).join(" · ");
  drawn(place, (width) => {
    const height = 150;
    const rows = ticks(range[0], range[1], 3);
    const left = 12 + 6.4 * Math.max(...rows.map((row) => tickText(row, rows).length));
    const x = scale([steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)], [left + 4, width - 10]);
    const y = scale(range, [height - 24, 8]);
    const cursor = s("line", { class: "cursor", y1: 4, y2: height - 24 });
    const dots = s("g");
    const svg = s("svg", {
      class: "lines", width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "slider",
      "aria-label": `${title} by step`, "aria-valuemin": steps[0], "aria-valuemax": steps[steps.length - 1],
    },
    rows.map((row) => s("g", { class: "tick" }, s("line", { x1: left, x2: width - 4, y1: y(row), y2: y(row) }),
      s("text", { x: left - 6, y: y(row) + 4, "text-anchor": "end", text: tickText(row, rows) }))),
    ticks(steps[0], steps[steps.length - 1], Math.min(6, width / 70)).filter(Number.isInteger).map((step) =>
      s("text", { class: "tick-x", x: x(step), y: height - 6, "text-anchor": "middle", text: step })),
    series.map((one) => s("path", { class: `line ${one.look}`, d: path(one, x, y) })),
    series.filter((one) => one.steps.length === 1).map((one) => s("circle", { class: `dot ${one.look}`, cx: x(one.steps[0]), cy: y(one.values[0]), r: 3 })),
    series.filter((one) => one.look !== "other").flatMap((one) => one.steps.map((step, i) => inFile.has(step)
      && Number.isFinite(one.values[i]) && s("circle", { class: `dot ${one.look}`, cx: x(step), cy: y(one.values[i]), r: 3 }))),
    cursor, dots);
    const show = (place2) => {
      at = Math.max(0, Math.min(steps.length - 1, place2));
      const step = steps[at];
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      dots.replaceChildren(...series.map((one) => [one, valueAt(one, step)]).filter(([, value]) => Number.isFinite(value))
        .map(([one, value]) => s("circle", { class: `dot at ${one.look}`, cx: x(step), cy: y(value), r: 4 })));
      svg.setAttribute("aria-valuenow", step);
      svg.setAttribute("aria-valuetext", `step ${step}: ${words(step) || "no value"}`);
      read.textContent = `step ${step}: ${words(step) || "–"}`;
    };
    const nearest = (event) => {
      const where = event.clientX - svg.getBoundingClientRect().left;
      let best = 0;
      steps.forEach((step, i) => { if (Math.abs(x(step) - where) < Math.abs(x(steps[best]) - where)) best = i; });
      return best;
    };
    svg.addEventListener("pointermove", (event) => { svg.classList.add("reads"); show(nearest(event)); });
    svg.addEventListener("pointerleave", () => { svg.classList.remove("reads"); show(steps.length - 1); });
    svg.addEventListener("click", (event) => open(steps[nearest(event)]));
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1, PageUp: at - 10, PageDown: at + 10 };
      if (event.key in moves) show(moves[event.key]);
      else if (event.key === "Enter" || event.key === " ") open(steps[at]);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    show(at);
    return svg;
  });
  return figure;
}

function path(one, x, y) {
  let d = "";
  let pen = false;
  one.steps.forEach((step, i) => {
    const value = one.values[i];
    if (!Number.isFinite(value)) return;  // a metric that is measured every so many steps is one line
    d += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return d;
}

// Shares of a whole against steps, stacked; each layer has a pattern besides its colour.
function shareChart({ steps, layers, open, inFile }) {
  const place = h("div", { class: "chart-place" });
  const read = h("span", { class: "reading" });
  drawn(place, (width) => {
    const height = 170;
    const left = 40;
    const band = (width - left - 8) / steps.length;
    const y = scale([0, 1], [height - 24, 8]);
    const svg = s("svg", { class: "shares", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Share of groups by step" },
      patterns(),
      [0, 0.5, 1].map((row) => s("text", { class: "tick-x", x: left - 6, y: y(row) + 4, "text-anchor": "end", text: `${row * 100} %` })));
    steps.forEach((step, i) => {
      let base = 0;
      const words = layers.map((layer) => `${layer.name} ${Math.round(layer.values[i] * 1000) / 10} %`).join(", ");
      const column = s("g", { class: "share", role: "link", tabindex: -1, "aria-label": `step ${step}: ${words}`, "data-step": step });
      for (const layer of layers) {
        const share = Number.isFinite(layer.values[i]) ? layer.values[i] : 0;
        column.append(s("rect", { class: layer.look, x: left + i * band, width: Math.max(band - (band > 6 ? 1.5 : 0), 0.5), y: y(base + share), height: Math.max(y(base) - y(base + share), 0) }));
        base += share;
      }
      const show = () => { read.textContent = `step ${step}: ${words}`; };
      for (const event of ["pointerenter", "focus"]) column.addEventListener(event, show);
      column.addEventListener("click", () => open(step));
      column.addEventListener("keydown", (event) => { if (event.key === "Enter") open(step); });
      svg.append(column);
      if (steps.length <= 12 || i % Math.ceil(steps.length / 10) === 0) {
        svg.append(s("text", { class: "tick-x", x: left + (i + 0.5) * band, y: height - 6, "text-anchor": "middle", text: step }));
      }
    });
    roving(svg, ".share");
    return svg;
  });
  const key = h("ul", { class: "key" }, layers.map((layer) => h("li", {},
    s("svg", { width: 14, height: 14, "aria-hidden": "true" }, patterns(), s("rect", { class: layer.look, width: 14, height: 14, rx: 2 })), layer.name, h("span", { class: "quiet" }, layer.about))));
  return h("figure", { class: "chart wide" }, h("figcaption", {}, h("h3", {}, "Share of groups"), read), place, key);
}

function patterns() {
  return s("defs", {},
    s("pattern", { id: "lines", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { class: "ground-solved", width: 6, height: 6 }), s("line", { class: "ink-solved", y2: 6 })),
    s("pattern", { id: "spots", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      s("rect", { class: "ground-unsolved", width: 6, height: 6 }), s("circle", { class: "ink-unsolved", cx: 3, cy: 3, r: 1.3 })));
}

// Stages on one clock. A pause in which nothing ran, as after a kill, is cut out and said.
function onOneClock(stages) {
  const ran = stages.filter((stage) => stage.started !== undefined).sort((a, b) => a.started - b.started);
  const worked = ran.reduce((sum, stage) => sum + stage.seconds, 0);
  let zero = ran.length ? ran[0].started : 0;
  let end = zero;
  return ran.map((stage) => {
    const pause = stage.started - end;
    const later = pause > Math.max(1, worked) ? pause : 0;
    zero += later;
    end = Math.max(end, stage.started + stage.seconds);
    return { stage, from: stage.started - zero, later };
  });
}

// When each stage of a step ran, so that what ran side by side is seen.
function waterfall(stages) {
  const bars = onOneClock(stages);
  if (!bars.length) return empty("no stage of this step is committed");
  const place = h("div", { class: "chart-place" });
  const end = Math.max(...bars.map((bar) => bar.from + bar.stage.seconds)) || 1;
  const told = bars.map((bar) => `${bar.stage.stage} from ${secondsText(bar.from)} for ${secondsText(bar.stage.seconds)}`);
  drawn(place, (width) => {
    const row = 24;
    const left = width < 500 ? 104 : 140;
    const height = bars.length * row + 26;
    const x = scale([0, end], [left, width - (width < 500 ? 64 : 150)]);
    const marks = ticks(0, end, Math.max(2, Math.min(6, width / 140)));
    return s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Stages on one clock: ${told.join("; ")}` },
      marks.map((mark) => s("g", { class: "tick" }, s("line", { x1: x(mark), x2: x(mark), y1: 0, y2: height - 22 }),
        s("text", { x: x(mark), y: height - 6, "text-anchor": "middle", text: `${tickText(mark, marks)} s` }))),
      bars.map(({ stage, from, later }, i) => {
        const length = Math.max(2, x(stage.seconds) - x(0));
        return s("g", { class: "bar" },
          s("text", { x: left - 8, y: i * row + 16, "text-anchor": "end", text: stage.stage }),
          s("rect", { x: x(from), y: i * row + 5, width: length, height: row - 10, rx: 2 }),
          s("text", { class: "value", x: x(from) + length + 6, y: i * row + 16, text: secondsText(stage.seconds) + (later ? ` · ${secondsText(later)} later` : "") }));
      }));
  });
  return place;
}

// Scores by group: one band each, its samples as dots as large as there are many, its mean as a line. Bands are wide enough to be hit.
function stripPlot(step, openGroup) {
  const columns = step.samples.columns;
  const groups = [...step.rowsOfGroup].map(([group, rows]) => {
    const scores = rows.map((row) => columns.score[row]).filter((score) => typeof score === "number");
    return { group, rows, scores, mean: scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null };
  });
  groups.sort((a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity));
  const range = extent([groups.flatMap((group) => group.scores)]);
  if (!range) return empty("no sample has a score");
  const read = h("p", { class: "reading", "aria-hidden": "true" }, "\u00a0");
  const place = h("div", { class: "chart-place scroll-x" });
  drawn(place, (room) => {
    const height = 210;
    const rows = ticks(range[0], range[1], 4);
    const left = 14 + 6.4 * Math.max(...rows.map((row) => tickText(row, rows).length));
    const band = Math.max(11, Math.min(60, (room - left - 8) / groups.length));
    const width = Math.max(room, left + 8 + band * groups.length);
    const y = scale(range, [height - 12, 10]);
    const svg = s("svg", { class: "strip", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Scores by group, highest mean first" },
      rows.map((row) => s("g", { class: "tick" }, s("line", { x1: left, x2: width - 4, y1: y(row), y2: y(row) }),
        s("text", { x: left - 6, y: y(row) + 4, "text-anchor": "end", text: tickText(row, rows) }))));
    groups.forEach((group, i) => {
      const x0 = left + i * band;
      const words = `group ${group.group}: mean ${num(group.mean)}, ${group.scores.length} of ${group.rows.length} with a score`;
      const mark = s("g", { class: "band", role: "link", tabindex: -1, "aria-label": words, "data-group": group.group },
        s("rect", { class: "hit", x: x0, y: 2, width: band, height: height - 6, rx: 3 }));
      const alike = new Map();
      for (const score of group.scores) alike.set(score, (alike.get(score) || 0) + 1);
      for (const [score, count] of alike) {
        mark.append(s("circle", { class: "dot a", cx: x0 + band / 2, cy: y(score), r: Math.min(band / 2 - 0.5, 0.8 + 1.5 * Math.sqrt(count)) }));
      }
      if (group.mean !== null) mark.append(s("line", { class: "mean", x1: x0 + band * 0.15, x2: x0 + band * 0.85, y1: y(group.mean), y2: y(group.mean) }));
      for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, () => { read.textContent = words; });
      mark.addEventListener("click", () => openGroup(group.group));
      mark.addEventListener("keydown", (event) => { if (event.key === "Enter") openGroup(group.group); });
      svg.append(mark);
    });
    roving(svg, ".band");
    return svg;
  });
  return h("figure", { class: "chart wide" }, h("figcaption", {}, h("h3", {}, "Score by group"),
    h("span", { class: "unit" }, `${groups.length} groups, highest mean first; a dot’s area counts samples, the line is the mean`)), place, read);
}

// Score against length; colour and shape tell whether the response came to its end.
function scatter(step, openSample) {
  const columns = step.samples.columns;
  if (!columns.score) return empty("the rewards are missing, so nothing is drawn against length");
  const there = [...columns.score.keys()].filter((row) => typeof columns.score[row] === "number");
  const xs = extent([there.map((row) => columns.length[row])]);
  const ys = extent([there.map((row) => columns.score[row])]);
  if (!xs) return empty("no sample has a score");
  const read = h("p", { class: "reading", "aria-hidden": "true" }, "\u00a0");
  const place = h("div", { class: "chart-place" });
  drawn(place, (width) => {
    const height = 210;
    const rows = ticks(ys[0], ys[1], 4);
    const left = 14 + 6.4 * Math.max(...rows.map((row) => tickText(row, rows).length));
    const x = scale(xs, [left + 8, width - 12]);
    const y = scale(ys, [height - 26, 10]);
    const marks = ticks(xs[0], xs[1], Math.max(2, Math.min(6, width / 80))).filter(Number.isInteger);
    const svg = s("svg", { class: "scatter", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Score against response length, ${there.length} samples; the table below has the same` },
      rows.map((row) => s("g", { class: "tick" }, s("line", { x1: left, x2: width - 4, y1: y(row), y2: y(row) }),
        s("text", { x: left - 6, y: y(row) + 4, "text-anchor": "end", text: tickText(row, rows) }))),
      marks.map((mark) => s("text", { class: "tick-x", x: x(mark), y: height - 8, "text-anchor": "middle", text: tickText(mark, marks) })));
    there.forEach((row, i) => {
      const cut = columns.finish_reason && columns.finish_reason[row] === "length";
      // Equal scores are spread a little, always the same way, so that a pile shows as one.
      const cx = x(columns.length[row]);
      const cy = y(columns.score[row]) + (((i * 7919) % 13) - 6) * 0.9;
      const mark = cut ? s("path", { class: "point cut", d: `M${cx - 3} ${cy - 3}l6 6m0 -6l-6 6` }) : s("circle", { class: "point", cx, cy, r: 2.6 });
      mark.addEventListener("pointerenter", () => { read.textContent = `${columns.sample_id[row]}: ${num(columns.length[row])} tokens, score ${num(columns.score[row])}${cut ? ", cut off" : ""}`; });
      mark.addEventListener("click", () => openSample(columns.sample_id[row]));
      svg.append(mark);
    });
    return svg;
  });
  const anyCut = columns.finish_reason && columns.finish_reason.includes("length");
  return h("figure", { class: "chart wide" }, h("figcaption", {}, h("h3", {}, "Score against length"),
    h("span", { class: "unit" }, `tokens${anyCut ? " · ○ ended, × cut off at the longest length" : ""}`)), place, read);
}
