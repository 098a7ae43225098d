// A step's page: its stages against the plan, its scores in two pictures, and the table of its samples.

const SAMPLE_COLUMNS = [
  ["sample_id", "Sample", "text", "names one response of the step"],
  ["group_id", "Group", "text", "the prompt that it answers"],
  ["score", "Score", "number", "weighted sum of the reward functions"],
  ["reward", "Reward", "number", "sum of the tokens' rewards: the score after KL and shaping"],
  ["advantage", "Advantage", "number", "mean over the response's tokens"],
  ["length", "Tokens", "number", "length of the response"],
  ["finish_reason", "End", "text", "stop: end token or stop text; length: cut off"],
  ["status", "Status", "text", "whether the reward functions gave a verdict"],
  ["extracted", "Answer", "text", "the answer that was found in the response"],
  ["truth", "Truth", "text", "the reference answer"],
  ["response_text", "Response", "text", "as decoded, without special tokens"],
  ["gap_max", "Gap, largest", "number", "largest |rollout − old log-prob|, nats"],
  ["gap_mean", "Gap, mean", "number", "mean of rollout − old log-prob, nats", true],
  ["entropy_mean", "Entropy", "number", "mean over tokens, nats"],
  ["kl_mean", "KL", "number", "mean k3 estimate of the KL to the reference, nats"],
  ["log_prob_mean", "Log-prob", "number", "mean over tokens, nats"],
  ["masked", "Left out", "number", "tokens that take no part in the loss", true],
  ["no_signal", "No signal", "text", "why the sample teaches nothing"],
  ["group_mean", "Group mean", "number", "mean score of the group", true],
  ["group_std", "Group std", "number", "standard deviation of the group's scores", true],
  ["message", "Message", "text", "why there is no verdict", true],
  ["data_source", "Source", "text", "data source of the prompt", true],
  ["prompt_text", "Prompt", "text", "after the chat template", true],
  ["prompt_index", "Row", "number", "row of the prepared data set", true],
  ["policy_version", "Policy", "number", "version that sampled the response", true],
  ["seconds", "Reward time", "number", "seconds that the reward functions took", true],
  ["seed", "Seed", "text", "of the response's random stream", true],
];

function truthOf(group) {
  if (!group || group.ground_truth === null || group.ground_truth === undefined) return null;
  try {
    const value = JSON.parse(group.ground_truth);
    return typeof value === "string" ? value : group.ground_truth;
  } catch {
    return group.ground_truth;
  }
}

function sampleColumns(step) {
  const { columns, groups, parts } = step.samples;
  const ofGroup = (key, pick) => (Object.values(groups).some((group) => pick(group) !== null && pick(group) !== undefined)
    ? columns.group_id.map((group) => pick(groups[group]) ?? null) : undefined);
  const values = {
    ...columns,
    truth: ofGroup("truth", truthOf),
    data_source: ofGroup("data_source", (group) => group.data_source),
    prompt_text: ofGroup("prompt_text", (group) => group.prompt_text),
    prompt_index: ofGroup("prompt_index", (group) => group.prompt_index),
  };
  const alike = values.reward && values.score && values.reward.every((value, row) => Math.abs(value - values.score[row]) < 1e-6);
  const list = SAMPLE_COLUMNS.filter(([key]) => values[key] && values[key].some((value) => value !== null) && !(alike && key === "reward"))
    .map(([key, label, kind, title, off]) => ({ key, label, kind, title, off, values: values[key] }));
  const names = Object.keys(parts);
  const place = list.findIndex((column) => column.key === "score") + 1;
  if (names.length > 1) {
    list.splice(place, 0, ...names.map((name) => ({ key: name, label: name, kind: "number", title: `score by ${name}`, values: parts[name] })));
  }
  const link = (kind, id) => h("a", { href: `#/step/${step.index}/${kind}/${id}` }, id);
  for (const column of list) {
    if (column.key === "sample_id") column.cell = (row, value) => link("sample", value);
    if (column.key === "group_id") column.cell = (row, value) => link("group", value);
    if (column.key === "response_text") column.cell = (row, value) => h("span", { class: "snippet" }, shownShort(value, 120));
    if (column.key === "status") column.cell = (row, value) => h("span", { class: value === "ok" ? "" : "flag" }, value === "ok" ? value : `! ${value}`);
    if (column.key === "finish_reason") column.cell = (row, value) => h("span", { class: value === "length" ? "flag" : "" }, value === "length" ? "✂ length" : value);
    if (column.key === "advantage") {
      const format = columnFormat(column.values);
      column.cell = (row, value) => h("span", { class: value > 0 ? "plus" : value < 0 ? "less" : "" }, `${value > 0 ? "+" : ""}${format(value)}`);
    }
  }
  return list;
}

async function drawStep(view, index) {
  const step = await stepOf(index);
  const run = await jsonOf("run");
  const children = [stepFacts(step, run), section("Stages", "What each stage left on disk, and what the plan said.", stageTable(step), h("h3", {}, "On one clock"), waterfall(step.stages))];
  if (step.updates.length) children.push(section("Optimizer steps", "The ratio of new to old probability exists only while an update runs; this is what it left.", updateTable(step)));
  if (!step.samples) {
    children.push(section("Samples", null, empty("The rollouts of this step cannot be read, so there are no samples to show.")));
    view.replaceChildren(...children);
    return;
  }
  const columns = sampleColumns(step);
  const state = once(`samples ${index}`, () => ({}));
  const openGroup = (group) => go(`#/step/${index}/group/${group}`);
  const openSample = (id) => go(`#/step/${index}/sample/${id}`);
  const list = step.samples.columns;
  const pictures = h("div", { class: "two" }, list.score ? stripPlot(step, openGroup) : empty("The rewards are missing, so there are no scores."), scatter(step, openSample));
  const texts = columns.filter((column) => column.kind === "text" && column.key !== "seed").map((column) => column.values);
  children.push(section("Scores", null, pictures), section("Samples", "Words search in all texts; comparisons such as score<0.5 or status=error in columns. Enter opens a sample.",
    dataTable({ caption: `samples of step ${index}`, columns, count: step.count, state, texts, numbered: "samples", hint: "Filter: words, score<0.5, length>=100", open: (row) => openSample(list.sample_id[row]) })));
  view.replaceChildren(...children);
}

function stepFacts(step, run) {
  const columns = step.samples ? step.samples.columns : {};
  const mean = (values) => {
    const there = (values || []).filter((value) => typeof value === "number");
    return there.length ? there.reduce((a, b) => a + b, 0) / there.length : null;
  };
  const cut = (columns.finish_reason || []).filter((reason) => reason === "length").length;
  const silent = (columns.no_signal || []).filter((why) => why !== null).length;
  const others = run.steps.map((one) => h("a", { href: `#/step/${one}`, "aria-current": one === step.index ? "page" : null }, one));
  return h("div", { class: "summary" },
    facts([
      ["Samples", num(step.count ?? null)],
      ["Groups", step.rowsOfGroup ? num(step.rowsOfGroup.size) : "–"],
      ["Mean score", num(mean(columns.score))],
      ["Mean length", `${num(mean(columns.length))} tokens`],
      ["Cut off", columns.finish_reason ? num(cut) : "–", "responses that reached the longest length"],
      ["Without a signal", columns.no_signal || columns.advantage ? num(silent) : "–", "samples of groups whose scores are all equal"],
      ["Policy", `${Math.max(step.index - 1, 0)} → ${step.index}`, "sampled from, made"],
      step.finished ? null : ["State", "not finished"],
    ]),
    h("nav", { class: "steps", "aria-label": "Steps in this file" }, h("span", { class: "quiet" }, "Steps in this file"), others));
}

function stageTable(step) {
  const cells = (stage) => {
    const planned = stage.planned;
    const shape = (rows, longest) => (longest ? `${num(rows)} × ${num(longest)}` : num(rows));
    const plan = h("td", { class: "number" }, planned ? shape(planned.rows, planned.longest) : "–");
    if (stage.state === "missing") return [h("td", {}, h("span", { class: "flag" }, "○ missing")), plan, h("td", { colspan: 6, class: "quiet" }, "nothing is committed")];
    if (stage.rows === undefined) return [h("td", {}, h("span", { class: "flag" }, "! damaged")), plan, h("td", { colspan: 6 }, stage.why)];
    const off = planned && planned.rows !== stage.rows;
    const state = stage.state === "there" ? h("span", { class: "good" }, "✓ committed") : stage.state === "dropped" ? h("span", { class: "quiet" }, "rows dropped by retention") : h("span", { class: "flag", title: stage.why }, "! damaged");
    return [h("td", {}, state), plan,
      h("td", { class: "number" }, shape(stage.rows, stage.shapes.longest), off ? h("span", { class: "flag", title: `the plan has ${planned.rows} rows` }, " ≠") : null),
      h("td", { class: "number" }, num(stage.shapes.tokens ?? null)), h("td", { class: "number" }, bytesText(stage.bytes)),
      h("td", { class: "number" }, secondsText(stage.seconds)), h("td", { class: "number" }, stage.attempts > 1 ? `${stage.attempt} of ${stage.attempts}` : num(stage.attempt)),
      h("td", {}, h("code", { title: stage.digest }, stage.digest.slice(0, 12)))];
  };
  const why = step.stages.filter((stage) => stage.why).map((stage) => h("p", { class: "flagged" }, h("strong", {}, stage.stage), ` ${stage.why}`));
  return h("div", {}, h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Stages" }, h("table", { class: "data plain stages" }, h("thead", {}, h("tr", {},
    ["Stage", "State"].map((name) => h("th", { scope: "col" }, name)),
    [["Planned", "rows × longest length, in tokens"], ["Measured", "rows × longest length, in tokens"], ["Tokens"], ["Size"], ["Time"], ["Attempt"]].map(([name, title]) => h("th", { scope: "col", class: "number", title }, name)),
    h("th", { scope: "col" }, "Digest"))),
  h("tbody", {}, step.stages.map((stage) => h("tr", { class: stage.state === "missing" ? "gone" : "", "data-stage": stage.stage }, h("th", { scope: "row" }, stage.stage), cells(stage)))))), why);
}

function updateTable(step) {
  const wanted = [["update_index", "#"], ["sequences", "Sequences"], ["tokens", "Tokens"], ["micro_batches", "Micro-batches"], ["loss", "Loss"], ["pg_loss", "Policy loss"], ["pg_clipfrac", "Clipped"], ["ratio_max", "Ratio, largest"], ["ppo_kl", "KL new/old"], ["kl_loss", "KL ref"], ["grad_norm", "Grad norm"], ["lr", "Learning rate"], ["seconds", "Time, s"], ["skipped", "Skipped"]];
  const there = wanted.filter(([key]) => step.updates.some((row) => row[key] !== null && row[key] !== undefined));
  return h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Optimizer steps" }, h("table", { class: "data plain" },
    h("thead", {}, h("tr", {}, there.map(([, label]) => h("th", { scope: "col", class: "number" }, label)))),
    h("tbody", {}, step.updates.map((row) => h("tr", {}, there.map(([key]) => h("td", { class: "number" }, num(row[key]))))))));
}

// Stages of the steps in the file and what each was made from.
async function drawLineage() {
  const run = await jsonOf("run");
  const steps = await Promise.all(run.steps.map(stepOf));
  byId("made-from").replaceChildren(...(steps.length ? steps.slice().reverse().map((step, i) => h("details", { open: i === 0 }, h("summary", {}, `Step ${step.index}`),
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": `What the stages of step ${step.index} were made from` }, h("table", { class: "data plain" },
      h("thead", {}, h("tr", {}, ["Stage", "Digest", "Made from", "Policy", "Lineage", "Attempt", "Code", "Committed"].map((name) => h("th", { scope: "col", class: ["Policy", "Lineage", "Attempt"].includes(name) ? "number" : null }, name)))),
      h("tbody", {}, step.stages.filter((stage) => stage.digest).map((stage) => h("tr", {}, h("th", { scope: "row" }, stage.stage), h("td", {}, h("code", { title: stage.digest }, stage.digest.slice(0, 12))),
        h("td", {}, Object.entries(stage.parents).map(([name, digest]) => {
          const parent = step.stages.find((one) => one.stage === name);
          const same = parent && parent.digest === digest;
          return h("div", {}, h("code", { title: digest }, digest.slice(0, 12)), ` ${name} `, parent ? h("span", { class: same ? "good" : "flag", title: same ? "the artifact that this step uses" : "not the artifact that this step uses" }, same ? "✓" : "≠") : null);
        }), Object.keys(stage.parents).length ? null : h("span", { class: "quiet" }, "data and policy")),
        h("td", { class: "number" }, num(stage.policy_version)), h("td", { class: "number" }, num(stage.lineage)), h("td", { class: "number" }, `${stage.attempt} of ${stage.attempts}`),
        h("td", {}, h("code", { title: stage.code }, stage.code.slice(0, 8))), h("td", { class: "when" }, stage.committed_at.slice(0, 19).replace("T", " "))))))))) : [empty("No step's batch is in this file.")]));
}
