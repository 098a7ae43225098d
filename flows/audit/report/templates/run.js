// The run's page: curves, groups over time, and every metric.

const HEADLINES = [
  { title: "Score", names: ["critic/score/mean"], about: "mean of what the reward functions returned" },
  { title: "Validation", prefix: "val-core/", about: "scores on the validation prompts" },
  { title: "Response length", unit: "tokens", names: ["response_length/mean"] },
  { title: "Cut off at the longest length", unit: "share", names: ["response_length/clip_ratio"] },
  { title: "Entropy", unit: "nats", names: ["actor/entropy"], about: "of the policy at the response's tokens" },
  { title: "KL to the reference", unit: "nats", names: ["actor/kl_loss", "actor/reward_kl_penalty", "critic/kl"] },
  { title: "Clip fraction", unit: "share", names: ["actor/pg_clipfrac", "actor/pg_clipfrac_lower"], about: "share of tokens whose ratio was clipped" },
  { title: "Gradient norm", names: ["actor/grad_norm"], about: "before clipping" },
  { title: "Sampler–trainer gap", unit: "mean |Δ probability|", names: ["training/rollout_probs_diff_mean"], about: "difference of the probabilities that engine and trainer give to the same tokens" },
  { title: "Samples without a signal", unit: "share", names: ["group/no_signal_samples"], about: "in groups whose scores are all equal" },
  { title: "Duplicates", unit: "share", names: ["rollout/duplicate_share"], about: "responses that another one of their group equals" },
  { title: "Learning rate", names: ["actor/lr"] },
  { title: "Time of a step", unit: "s", names: ["timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/old_log_prob"] },
];
const LOOKS = ["a", "b", "c", "d"];

// name -> {steps, values}, only where there is a number.
async function metricsOf(which) {
  return once(`metrics ${which}`, async () => {
    const about = (await jsonOf("run"))[which];
    const found = new Map();
    if (!about) return found;
    const all = await arrayOf(which);
    about.names.forEach((name, i) => {
      const values = all.subarray(i * about.steps.length, (i + 1) * about.steps.length);
      const there = [...values.keys()].filter((at) => Number.isFinite(values[at]));
      if (there.length) found.set(name, { steps: there.map((at) => about.steps[at]), values: there.map((at) => values[at]) });
    });
    return found;
  });
}

function seriesOf(names, mine, other, run) {
  // Of two runs one metric is drawn, so that each line is one run.
  const here = names.filter((name) => mine.has(name) || other.has(name)).slice(0, run.compare ? 1 : 4);
  const label = (name) => (here.length > 1 ? name.split("/").slice(-1)[0] : name);
  const list = here.filter((name) => mine.has(name)).map((name, i) => ({ name: run.compare ? run.name : label(name), look: LOOKS[i], ...mine.get(name) }));
  if (run.compare && here.length && other.has(here[0])) list.push({ name: run.compare.name, look: "other", ...other.get(here[0]) });
  return list;
}

async function drawRun(view) {
  const run = await jsonOf("run");
  const mine = await metricsOf("curves");
  const other = await metricsOf("other_curves");
  const inFile = new Set(run.steps);
  const open = (step) => go(`#/step/${step}`);
  const charts = HEADLINES.map((one) => {
    const names = one.prefix ? [...mine.keys()].filter((name) => name.startsWith(one.prefix)) : one.names;
    const series = seriesOf(names, mine, other, run);
    return series.length ? lineChart({ ...one, about: `${names.join(", ")}${one.about ? `: ${one.about}` : ""}`, series, inFile, open }) : null;
  });
  const layers = ["mixed", "all_pass", "all_fail"].map((name) => mine.get(`group/${name}`));
  byId("curves").replaceChildren(...(charts.some(Boolean) ? charts.filter(Boolean) : [empty("no step is finished yet")]));
  byId("groups").replaceChildren(layers[0] ? shareChart({
    steps: layers[0].steps, inFile, open,
    layers: [
      { name: "mixed", about: "teaches: some responses are better than others", look: "mixed", values: layers[0].values },
      { name: "solved", about: "every response gets the most", look: "solved", values: (layers[1] || layers[0]).values },
      { name: "unsolved", about: "every response gets the least", look: "unsolved", values: (layers[2] || layers[0]).values },
    ],
  }) : empty("no step has told the shares of its groups"));
  const last = run.steps[run.steps.length - 1];
  if (last !== undefined) {
    byId("clock-title").textContent = `Where the time of step ${last} went`;
    byId("clock").replaceChildren(waterfall((await stepOf(last)).stages));
  } else byId("clock").replaceChildren(empty("no step's batch is in this file"));
  byId("metrics").replaceChildren(metricsTable(run, mine, other, inFile, open));
  view.dataset.drawn = "yes";
}

function metricsTable(run, mine, other, inFile, open) {
  const names = [...new Set([...mine.keys(), ...other.keys()])].sort(collator.compare);
  const of = (pick) => names.map((name) => (mine.has(name) ? pick(mine.get(name)) : null));
  const columns = [
    { key: "metric", label: "Metric", values: names, kind: "text", cell: (row) => h("code", {}, names[row]) },
    { key: "curve", label: "Curve", values: names, kind: "text", cell: (row) => spark(mine.get(names[row])) },
    { key: "first", label: "First", values: of((one) => one.values[0]), kind: "number" },
    { key: "last", label: "Last", values: of((one) => one.values[one.values.length - 1]), kind: "number" },
    { key: "least", label: "Least", values: of((one) => Math.min(...one.values)), kind: "number" },
    { key: "most", label: "Most", values: of((one) => Math.max(...one.values)), kind: "number" },
  ];
  // The metrics have different units: each value has a format of its own.
  for (const column of columns.slice(2)) column.cell = (row, value) => document.createTextNode(num(value));
  if (run.compare) {
    const pairs = names.map((name) => lastCommon(mine.get(name), other.get(name)));
    const cells = (pick) => pairs.map(pick);
    const show = (row, value) => document.createTextNode(num(value));
    columns.splice(2, 4,
      { key: "step", label: "Step", title: "the last step that both runs have; none: each one’s own last", values: cells((pair) => pair.step), kind: "number", cell: show },
      { key: "this", label: run.name, values: cells((pair) => pair.mine), kind: "number", cell: show },
      { key: "other", label: run.compare.name, values: cells((pair) => pair.other), kind: "number", cell: show },
      { key: "delta", label: "Difference", title: `${run.compare.name} minus ${run.name}`, values: cells((pair) => (pair.step === null ? null : pair.other - pair.mine)), kind: "number", cell: (row, value) => document.createTextNode(value === null ? "–" : signed(value)) });
  }
  const state = once("metrics table", () => ({}));
  const chosen = h("div", { class: "chosen" });
  const table = dataTable({
    caption: "metrics", columns, count: names.length, state, texts: [names], numbered: "metrics", size: 25, hint: "Filter, for example timing_s",
    open: (row) => {
      const series = seriesOf([names[row]], mine, other, run);
      chosen.replaceChildren(lineChart({ title: names[row], series, inFile, open }));
      chosen.scrollIntoView({ block: "nearest" });
      say(`curve of ${names[row]} is shown above the table`);
    },
  });
  return h("div", {}, chosen, table);
}

function lastCommon(mine, other) {
  if (!mine || !other) {
    const last = (one) => (one ? one.values[one.values.length - 1] : null);
    return { step: null, mine: last(mine), other: last(other) };
  }
  for (let i = mine.steps.length - 1; i >= 0; i--) {
    const at = other.steps.indexOf(mine.steps[i]);
    if (at >= 0) return { step: mine.steps[i], mine: mine.values[i], other: other.values[at] };
  }
  return { step: null, mine: mine.values[mine.values.length - 1], other: other.values[other.values.length - 1] };
}

function spark(one) {
  if (!one || one.values.length < 2) return null;
  const range = extent([one.values]);
  const x = scale([one.steps[0], one.steps[one.steps.length - 1]], [1, 89]);
  return s("svg", { class: "spark", width: 90, height: 20, viewBox: "0 0 90 20", "aria-hidden": "true" },
    s("path", { class: "line a", d: path(one, x, scale(range, [18, 2])) }));
}
