// What the file holds, unpacked when it is needed: base64 -> inflated bytes -> numbers or JSON.

const unpacked = new Map();

function once(id, make) {
  if (!unpacked.has(id)) unpacked.set(id, make());
  return unpacked.get(id);
}

function source(id) {
  return document.getElementById(`data-${id}`);
}

function has(id) {
  return source(id) !== null;
}

async function inflated(id) {
  const text = atob(source(id).textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function jsonOf(id) {
  return once(id, async () => JSON.parse(new TextDecoder().decode(await inflated(id))));
}

const KINDS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float16: Uint16Array, float32: Float32Array };

function arrayOf(id) {
  return once(id, async () => {
    const planes = await inflated(id);
    const type = source(id).dataset.type;
    const size = KINDS[type].BYTES_PER_ELEMENT;
    const count = planes.length / size;
    const bytes = new Uint8Array(planes.length);
    for (let byte = 0; byte < size; byte++) {
      for (let i = 0; i < count; i++) bytes[i * size + byte] = planes[byte * count + i];
    }
    const numbers = new KINDS[type](bytes.buffer);
    return type === "float16" ? floats(numbers, Number(source(id).dataset.factor)) : numbers;
  });
}

let halves = null;

// Every 16-bit float there is, by its bits.
function halfTable() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) table[bits] = fraction ? NaN : sign * Infinity;
    else if (exponent === 0) table[bits] = sign * fraction * 2 ** -24;
    else table[bits] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return table;
}

function floats(bits, factor) {
  halves = halves || halfTable();
  const numbers = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) numbers[i] = halves[bits[i]] * factor;
  return numbers;
}

// A step of this file: its stages, table of samples, and token columns, which are read when a sample is opened.
function stepOf(index) {
  return once(`step ${index}`, async () => {
    const step = await jsonOf(`step-${index}`);
    step.samples = null;
    if (has(`step-${index}-samples`)) {
      step.samples = await jsonOf(`step-${index}-samples`);
      const columns = step.samples.columns;
      step.count = columns.sample_id.length;
      step.rowOf = new Map(columns.sample_id.map((id, row) => [id, row]));
      step.starts = new Uint32Array(step.count + 1);
      columns.length.forEach((length, row) => { step.starts[row + 1] = step.starts[row] + length; });
      step.rowsOfGroup = new Map();
      columns.group_id.forEach((group, row) => {
        if (!step.rowsOfGroup.has(group)) step.rowsOfGroup.set(group, []);
        step.rowsOfGroup.get(group).push(row);
      });
    }
    return step;
  });
}

function tokensOf(step) {
  return once(`tokens ${step.index}`, async () => {
    const tokens = {};
    for (const name of step.token_columns) tokens[name] = await arrayOf(`step-${step.index}-token-${name}`);
    const vocabulary = await jsonOf(`step-${step.index}-vocabulary`);
    const special = new Set(vocabulary.special);
    tokens.vocabulary = vocabulary.ids.map((id, place) => ({
      id, text: vocabulary.texts[place], special: special.has(id),
    }));
    // Derived as flows/audit/report/token_columns.py defines them.
    if (tokens.gap) tokens.ratio = tokens.gap.map((gap) => Math.exp(-gap));
    if (tokens.ref_gap) tokens.kl = tokens.ref_gap.map((gap) => Math.max(0, Math.expm1(-gap) + gap));
    return tokens;
  });
}
