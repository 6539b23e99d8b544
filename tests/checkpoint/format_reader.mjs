// A reader of checkpoints in another language, from docs/checkpoint-format.md alone. It prints what it read as JSON in
// which every value carries its type: integers as text, floats and tensors as the hexadecimal text of their bytes.
// Node has no XXH3, so that hashes and the seal are left to the reader in Python; sizes are compared.
import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";

class Float {
  constructor(value) { this.value = value; }
}

// JSON with integers as BigInt, other numbers as Float, objects as Map; a key that stands twice is refused.
function parse(bytes) {
  const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  let at = 0;
  const space = () => { while (" \n\r\t".includes(text[at]) && at < text.length) at++; };
  const expect = (token) => {
    space();
    if (!text.startsWith(token, at)) throw new Error(`expected ${token} at ${at}`);
    at += token.length;
  };
  const next = () => { space(); return text[at]; };
  const list = (close, item) => {
    if (next() === close) { at++; return; }
    for (;;) {
      item();
      if (next() === close) { at++; return; }
      expect(",");
    }
  };
  const string = () => {
    const match = /"(?:[^"\\\u0000-\u001f]|\\.)*"/y;
    space();
    match.lastIndex = at;
    const [token] = match.exec(text);
    at += token.length;
    return JSON.parse(token);
  };
  const value = () => {
    const first = next();
    if (first === "{") {
      const found = new Map();
      expect("{");
      list("}", () => {
        const key = string();
        expect(":");
        if (found.has(key)) throw new Error(`${key} stands twice`);
        found.set(key, value());
      });
      return found;
    }
    if (first === "[") {
      const found = [];
      expect("[");
      list("]", () => found.push(value()));
      return found;
    }
    if (first === '"') return string();
    for (const [word, meaning] of [["null", null], ["true", true], ["false", false]]) {
      if (text.startsWith(word, at)) { at += word.length; return meaning; }
    }
    const number = /-?\d+(\.\d+)?([eE][+-]?\d+)?/y;
    number.lastIndex = at;
    const [token, fraction, exponent] = number.exec(text);
    at += token.length;
    return fraction || exponent ? new Float(Number(token)) : BigInt(token);
  };
  const found = value();
  space();
  if (at !== text.length) throw new Error("something follows");
  return found;
}

const WIDTHS = {
  F64: 8, F32: 4, F16: 2, BF16: 2, F8_E4M3: 1, F8_E5M2: 1, I64: 8, I32: 4, I16: 2, I8: 1, U64: 8, U32: 4, U16: 2,
  U8: 1, BOOL: 1,
};

function readSafetensors(file) {
  const bytes = readFileSync(file);
  const length = bytes.readBigUInt64LE(0);
  if (length > 100_000_000n || 8n + length > BigInt(bytes.length)) throw new Error(`${file}: header`);
  const begin = 8 + Number(length);
  const found = new Map();
  for (const [name, entry] of parse(bytes.subarray(8, begin))) {
    if (name === "__metadata__") continue;
    const shape = entry.get("shape").map(Number);
    const [from, to] = entry.get("data_offsets").map(Number);
    const size = shape.reduce((left, right) => left * right, 1) * WIDTHS[entry.get("dtype")];
    if (to - from !== size || begin + to > bytes.length) throw new Error(`${file}: ${name}`);
    found.set(name, { dtype: entry.get("dtype"), shape, data: bytes.subarray(begin + from, begin + to) });
  }
  return found;
}

function trueTensor(stored, dtype) {
  const shape = dtype?.startsWith("torch.complex") ? stored.shape.slice(0, -1) : stored.shape;
  return ["tensor", dtype ?? stored.dtype, shape, stored.data.toString("hex")];
}

const hex = (text) => Buffer.from(text, "utf-8").toString("hex");
const ints = (values) => ["tuple", values.map((value) => ["int", String(value)])];

function float(value) {
  if (Number.isNaN(value)) return ["float", "nan"];
  const bytes = Buffer.alloc(8);
  bytes.writeDoubleBE(value);
  return ["float", bytes.toString("hex")];
}

const ordered = (items) => items.map((item) => JSON.stringify(item)).sort().map((text) => JSON.parse(text));

function tree(node, stored) {
  const items = () => node.get("v").map((item) => tree(item, stored));
  if (typeof node === "bigint") return ["int", String(node)];
  if (typeof node === "string") return ["str", hex(node)];
  if (node instanceof Float) return float(node.value);
  if (Array.isArray(node)) return ["list", node.map((item) => tree(item, stored))];
  if (!(node instanceof Map)) return node;
  if (!node.has("$")) return ["dict", [...node].map(([key, item]) => [["str", hex(key)], tree(item, stored)])];
  const [tag, v] = [node.get("$"), node.get("v")];
  const text = () => ["str", hex(v)];
  switch (tag) {
    case "tensor": return trueTensor(stored.get(v), node.get("dtype"));
    case "pieces": {
      const shape = node.get("shape").map(Number);
      const data = stored.pieces.get(v) ?? Buffer.alloc(0);
      if ((data.length === 0) !== shape.includes(0)) throw new Error(`pieces of ${v}`);
      return ["tensor", node.get("dtype"), shape, data.toString("hex")];
    }
    case "ndarray": {
      const data = node.has("v") ? stored.get(v).data.toString("hex") : "";
      return ["tag", tag, ["tuple", [["str", hex(node.get("dtype"))], ints(node.get("shape")), ["bytes", data]]]];
    }
    case "npscalar": return ["tag", tag, ["tuple", [["str", hex(node.get("dtype"))], ["bytes", v]]]];
    case "npstr": case "path": return ["tag", tag, tree(v, stored)];
    case "npbytes": return ["tag", tag, ["bytes", v]];
    case "tuple": return ["tuple", items()];
    case "set": case "frozenset": return [tag, ordered(items())];
    case "dict": case "OrderedDict": case "Counter": case "defaultdict": {
      const pairs = ["dict", v.map((pair) => pair.map((item) => tree(item, stored)))];
      return tag === "dict" ? pairs : ["tag", tag, ["tuple", [tree(node.get("factory") ?? null, stored), pairs]]];
    }
    case "int": return ["int", String(v.startsWith("-") ? -BigInt(v.slice(1)) : BigInt(v))];
    case "float": return float({ nan: NaN, inf: Infinity, "-inf": -Infinity }[v]);
    case "complex": return ["complex", ...items()];
    case "str": return ["str", v];
    case "bytes": return ["bytes", v];
    case "datetime": {
      const time = ["datetime", v, Number(node.get("fold"))];
      return node.has("zone") ? ["tag", "zoned", ["tuple", [time, ["str", hex(node.get("zone"))]]]] : time;
    }
    case "date": return ["date", v];
    case "timedelta": return ["timedelta", ...v.map(Number)];
    case "duration": return ["tag", tag, ["tuple", items()]];
    case "size": return ["tag", tag, ints(v)];
    case "dtype": case "device": return ["tag", tag, text()];
    default: throw new Error(`unknown type ${tag}`);
  }
}

const folder = process.argv[2];
const manifest = parse(readFileSync(join(folder, "manifest.json")));
if (![1n, 2n].includes(manifest.get("format_version"))) throw new Error("version");
const listed = new Map([...manifest.get("parts").values()].flatMap((part) => [...part.get("files")]));
for (const [path, entry] of listed) {
  if (path.split("/").some((step) => ["", ".", ".."].includes(step)) || /[\\:\0]/.test(path)) throw new Error(path);
  if (BigInt(statSync(join(folder, path)).size) !== entry.get("size")) throw new Error(path);
}

function readStored(stem) {
  return listed.has(`${stem}.safetensors`) ? readSafetensors(join(folder, `${stem}.safetensors`)) : new Map();
}

// The numbers of a piece's elements in the flattened tensor, in the order in which they are stored.
function elementsOf(entry, shape) {
  if (entry.has("start")) {
    const start = Number(entry.get("start"));
    return Array.from({ length: Number(entry.get("stop")) - start }, (_, i) => start + i);
  }
  return entry.get("offsets").reduce((found, first, dim) => found.flatMap((number) => Array.from(
    { length: Number(entry.get("lengths")[dim]) }, (_, i) => number * shape[dim] + Number(first) + i)), [0]);
}

function readPieces(part) {
  const found = new Map();
  for (let rank = 0; ; rank++) {
    const stem = `${part}/rank-${String(rank).padStart(5, "0")}`;
    if (part === "rng" || !listed.has(`${stem}.json`)) return found;
    const stored = readStored(stem);
    for (const entry of parse(readFileSync(join(folder, `${stem}.json`))).get("pieces")) {
      const shape = entry.get("shape").map(Number);
      const numbers = elementsOf(entry, shape);
      const { data } = stored.get(entry.get("stored"));
      const width = data.length / numbers.length;
      const name = entry.get("tensor");
      const count = shape.reduce((left, right) => left * right, 1);
      if (!found.has(name)) found.set(name, Buffer.alloc(count * width));
      numbers.forEach((number, i) => data.copy(found.get(name), number * width, i * width, (i + 1) * width));
    }
  }
}

function readTree(stem, pieces) {
  const stored = readStored(stem);
  stored.pieces = pieces ?? new Map();
  return tree(parse(readFileSync(join(folder, `${stem}.json`))), stored);
}

function numbered(stem) {
  const found = [];
  const pieces = readPieces(stem.split("/")[0]);
  for (;;) {
    const name = `${stem}-${String(found.length).padStart(5, "0")}`;
    if (!listed.has(`${name}.json`)) return ["list", found];
    found.push(readTree(name, pieces));
  }
}

function readModel() {
  if (listed.has("model/state.json")) return readTree("model/state", readPieces("model"));
  const index = parse(readFileSync(join(folder, "model", "model.safetensors.index.json")));
  const notes = index.get("metadata").get("trainwright");
  const shards = new Map();
  const model = new Map();
  for (const [name, file] of index.get("weight_map")) {
    if (!shards.has(file)) shards.set(file, readSafetensors(join(folder, "model", file)));
    model.set(name, trueTensor(shards.get(file).get(name), notes.get("dtypes").get(name)));
  }
  for (const [name, first] of notes.get("tied")) model.set(name, model.get(first));
  const extra = notes.has("extra") ? readTree(`model/${notes.get("extra")}`)[1] : [];
  return ["dict", [...[...model].map(([name, value]) => [["str", hex(name)], value]), ...extra]];
}

console.log(JSON.stringify({
  trainer: readTree("trainer"), rng: numbered("rng/rank"), optimizer: numbered("optimizer/optimizer"),
  model: readModel(),
}));
