// The leaf of echostore's coherence protocol for browsers: one ES module, no build step, no dependencies.
//
//   import { connect } from "./echostore-leaf.js";
//   const party = await connect("ws://127.0.0.1:8080/thin", capability);
//   const task = party.create({ type: "task" }, { title: "Tickets", done: false });
//   party.query({ type: "task" }).orderBy("title").watch((answer) => show(answer));
//
// Parts, in order: bytes, protobuf, values, queries, what is held (rules D1 to D8), outbox and ids, own edits on top,
// storage, the machine, connections, and what an application touches. It says and believes what the machines of
// `echostore.kernel.coherence` say and believe; the tests run both on the same frames.

// ---------------------------------------------------------------- bytes

const TEXT = new TextEncoder();
const UNTEXT = new TextDecoder("utf-8", { fatal: true });
const NOTHING = new Uint8Array(0);

export function hex(bytes) {
  return Array.from(bytes, (each) => each.toString(16).padStart(2, "0")).join("");
}

export function unhex(text) {
  if (typeof text !== "string" || text.length % 2 || /[^0-9a-f]/i.test(text)) throw new EchoError("E-USAGE", "not hex digits");
  return Uint8Array.from(text.match(/../g) ?? [], (each) => parseInt(each, 16));
}

export function base64url(bytes) {
  let text = "";
  for (const each of bytes) text += String.fromCharCode(each);
  return btoa(text).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

export function unbase64url(text) {
  const plain = atob(text.trim().replace(/-/g, "+").replace(/_/g, "/"));
  return Uint8Array.from(plain, (each) => each.charCodeAt(0));
}

function joined(...parts) {
  const all = new Uint8Array(parts.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

function sameBytes(one, other) {
  if (one === other) return true;
  if (one.length !== other.length) return false;
  for (let at = 0; at < one.length; at++) if (one[at] !== other[at]) return false;
  return true;
}

function compareBytes(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let at = 0; at < shorter; at++) if (one[at] !== other[at]) return one[at] - other[at];
  return one.length - other.length;
}

const SHA_K = new Uint32Array(64);
{
  let found = 0;
  for (let number = 2; found < 64; number++) {
    let prime = true;
    for (let part = 2; part * part <= number; part++) if (number % part === 0) prime = false;
    if (prime) SHA_K[found++] = (Math.cbrt(number) % 1) * 2 ** 32;
  }
}

// SHA-256. The machine can't wait, and the browser's own is asynchronous.
export function sha256(data) {
  const state = new Uint32Array([0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19]);
  const padded = new Uint8Array(((data.length + 8) >> 6 << 6) + 64);
  padded.set(data);
  padded[data.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(data.length / 2 ** 29));
  view.setUint32(padded.length - 4, (data.length << 3) >>> 0);
  const words = new Uint32Array(64);
  const turn = (word, by) => (word >>> by) | (word << (32 - by));
  for (let block = 0; block < padded.length; block += 64) {
    for (let at = 0; at < 16; at++) words[at] = view.getUint32(block + 4 * at);
    for (let at = 16; at < 64; at++) {
      const a = words[at - 15], b = words[at - 2];
      words[at] = words[at - 16] + words[at - 7] + (turn(a, 7) ^ turn(a, 18) ^ (a >>> 3)) + (turn(b, 17) ^ turn(b, 19) ^ (b >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let at = 0; at < 64; at++) {
      const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + SHA_K[at] + words[at]) >>> 0;
      const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) >>> 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) >>> 0, c, b, a, (one + two) >>> 0];
    }
    [a, b, c, d, e, f, g, h].forEach((each, at) => (state[at] += each));
  }
  const digest = new Uint8Array(32);
  const out = new DataView(digest.buffer);
  state.forEach((each, at) => out.setUint32(4 * at, each));
  return digest;
}

// ---------------------------------------------------------------- errors

export class EchoError extends Error {
  constructor(code, what, nextStep = "") {
    super(nextStep ? `${what}. ${nextStep}` : what);
    this.name = "EchoError";
    this.code = code;
    this.what = what;
  }
}

// ---------------------------------------------------------------- protobuf
//
// Types: u number, U 64 bits, z zigzag, F fixed 64 bits, d double, B bool, s text, b bytes, or a message's name.
// Flags: r repeated, o present even when it is the default.

const SCHEMA = {
  Value: {
    null: [1, "B", "o"], boolean: [2, "B", "o"], integer: [3, "z", "o"], number: [4, "d", "o"], text: [5, "s", "o"],
    binary: [6, "b", "o"], timestamp: [7, "z", "o"], list: [8, "ListValue"], map: [9, "MapValue"],
    reference: [10, "Reference"], blob: [11, "BlobReference"],
  },
  ListValue: { values: [1, "Value", "r"] },
  MapValue: { keys: [1, "s", "r"], values: [2, "Value", "r"] },
  Reference: { item: [1, "b"], party: [2, "b"] },
  BlobReference: { cids: [1, "b", "r"], size: [2, "u"], mediaType: [3, "s"], name: [4, "s"] },
  QuerySpec: { stages: [1, "QueryStage", "r"], order: [2, "QueryOrder", "r"], limit: [3, "u"], select: [4, "QueryField", "r"] },
  QueryStage: { step: [1, "u"], filter: [2, "QueryFilter"], deleted: [3, "u"] },
  QueryField: { steps: [1, "s", "r"], attribute: [2, "B"] },
  QueryFilter: { compare: [1, "QueryCompare"], negated: [2, "QueryFilter"], all: [3, "QueryFilters"], any: [4, "QueryFilters"] },
  QueryFilters: { parts: [1, "QueryFilter", "r"] },
  QueryCompare: { field: [1, "QueryField"], op: [2, "u"], values: [3, "Value", "r"] },
  QueryOrder: { field: [1, "QueryField"], descending: [2, "B"] },
  IndexSpec: { version: [1, "u"], party: [2, "b"], query: [3, "QuerySpec"], item: [4, "b"], sealed: [5, "B"] },
  IndexItem: {
    item: [1, "b"], type: [2, "s"], model: [3, "s"], parent: [4, "b"], deleted: [5, "B"], state: [6, "b"],
    source: [7, "b"], target: [8, "b"], hash: [9, "b"], record: [10, "b"],
  },
  IndexValue: { items: [1, "IndexItem", "r"], seal: [2, "b"], revoked: [3, "b", "r"] },
  IndexPatch: { removed: [1, "b"], upserts: [2, "IndexItem", "r"], places: [3, "u", "r"], order: [4, "b"], seal: [5, "b"] },
  LeafOperation: { operation: [1, "Operation"], text: [2, "TextEdit"], list: [3, "ListEdit"] },
  TextEdit: { position: [1, "u"], removed: [2, "s"], inserted: [3, "s"], before: [4, "s"] },
  ListEdit: { position: [1, "u"], removed: [2, "Value", "r"], inserted: [3, "Value", "r"] },
  Operation: {
    feed: [1, "b"], local: [2, "U"], genesis: [3, "Genesis"], propertySet: [4, "PropertySetOperation"],
    metadata: [5, "PropertySetOperation"], log: [8, "ThreadedLogOperation"], placement: [10, "Placement"],
  },
  Genesis: { model: [1, "s"], version: [2, "u"], type: [3, "s"], parent: [4, "b"], link: [5, "LinkEnds"] },
  LinkEnds: { source: [1, "b"], target: [2, "b"], targetParty: [3, "b"] },
  PropertySetOperation: { changes: [1, "PropertyChange", "r"] },
  PropertyChange: { path: [1, "s", "r"], set: [2, "Value"], delete: [3, "B", "o"] },
  ThreadedLogOperation: { post: [1, "Post"] },
  Post: { body: [1, "Value"], replyTo: [2, "PostId"] },
  PostId: { feed: [1, "b"], seq: [2, "u"], position: [3, "u"] },
  Placement: { kind: [1, "u"], parent: [2, "b"] },
  System: { root: [1, "b"], path: [2, "u", "r"] },
  Arc: { system: [1, "System"], gen: [2, "u"] },
  IssuedId: { arc: [1, "Arc"], n: [2, "u"] },
  Turned: { system: [1, "System"], turn: [2, "u", "r"], credential: [3, "b"] },
  Witness: { clock: [1, "Arc"], tick: [2, "u"] },
  Attach: {
    nonce: [1, "F"], system: [2, "System"], wantsArc: [3, "B"], seen: [4, "u"], below: [5, "Turned", "r"],
    turn: [6, "u", "r"], credential: [7, "b"], vector: [8, "B"],
  },
  Attached: { turn: [1, "u", "r"], system: [2, "System"], tick: [3, "u"], follows: [4, "Witness", "r"], rejected: [5, "RejectOp", "r"] },
  GrantSystemId: { nonce: [1, "F"], system: [2, "System"], turn: [3, "u", "r"] },
  GrantArc: { arc: [1, "Arc"], base: [2, "U"] },
  ReleaseArc: { arc: [1, "Arc"], batch: [2, "u"], signature: [3, "b"] },
  Linked: { clock: [1, "Arc"], tick: [2, "u"], follows: [3, "Witness", "r"], rejected: [4, "RejectOp", "r"] },
  BeginUpdate: { clock: [1, "Arc"], prev: [2, "u"], tick: [3, "u"] },
  LaneItem: {
    clock: [1, "Arc"], tick: [2, "u"], lane: [3, "u"], index: [4, "u"], subscribed: [5, "Subscribed"],
    invalidate: [6, "b", "o"], delta: [7, "Delta"], rejectOp: [8, "RejectOp"], publishOp: [9, "PublishOp"],
  },
  EndUpdate: {
    clock: [1, "Arc"], prev: [2, "u"], tick: [3, "u"], follows: [4, "Witness", "r"], lanes: [5, "u", "r"],
    counts: [6, "u", "r"], signature: [7, "b"],
  },
  Update: {
    clock: [1, "Arc"], prev: [2, "u"], tick: [3, "u"], follows: [4, "Witness", "r"], items: [5, "UpdateItem", "r"],
    signature: [6, "b"],
  },
  UpdateItem: {
    subscribed: [1, "Subscribed"], invalidate: [2, "b", "o"], delta: [3, "Delta"], rejectOp: [4, "RejectOp"],
    publishOp: [5, "PublishOp"],
  },
  Subscribed: { spec: [1, "b"], gm: [2, "u"] },
  Delta: { spec: [1, "b"], gm: [2, "u"], patch: [3, "b"] },
  RejectOp: { op: [1, "IssuedId"], reason: [2, "s"], object: [3, "b"] },
  PublishOp: { op: [1, "IssuedId"], object: [2, "b"], delta: [3, "b"] },
  Acquire: { spec: [1, "b"], at: [2, "u", "o"], have: [3, "b", "o"] },
  Grant: { spec: [1, "b"], at: [2, "u", "o"], min: [3, "u"], max: [4, "u"], value: [5, "b", "o"], same: [6, "b", "o"] },
  Gone: { spec: [1, "b"], at: [2, "u"], oldest: [3, "u"] },
  Denied: { spec: [1, "b"], reason: [2, "s"] },
  Touched: { specs: [1, "b", "r"] },
  Pin: { tick: [1, "u", "o"] },
  NotifyReplicated: { clock: [1, "Arc"], batch: [2, "u"], root: [3, "System"], tick: [4, "u"] },
  Announce: { system: [1, "System"], name: [2, "s"], gen: [3, "u"], seq: [4, "u"], detail: [5, "b"], signature: [6, "b"] },
  Connectivity: { system: [1, "System"], affectsAllServices: [2, "B"], turn: [3, "u", "r"] },
  MessageId: { sender: [1, "System"], stream: [2, "u"], seq: [3, "u"] },
  Clause: { witnesses: [1, "Witness", "r"] },
  UserMessage: {
    id: [1, "MessageId"], floor: [2, "u"], target: [3, "System"], context: [4, "Clause", "r"], type: [5, "s"],
    payload: [6, "b"], crossRoot: [7, "B"], after: [8, "u"], signature: [9, "b"],
  },
  UserReceipt: { id: [1, "MessageId"], target: [2, "System"], signature: [3, "b"] },
  Undelivered: { id: [1, "MessageId"], reason: [2, "s"] },
  Backpressure: { what: [1, "s"], retryAfterS: [2, "d"] },
  Capability: { body: [1, "b"], signature: [2, "b"] },
  CapabilityBody: { party: [1, "b"], issuer: [2, "b"], sealers: [10, "b", "r"] }, // the rest is for the other side
  Frame: {
    generation: [1, "F"], attach: [2, "Attach"], attached: [3, "Attached"], grantSystemId: [4, "GrantSystemId"],
    grantArc: [5, "GrantArc"], releaseArc: [6, "ReleaseArc"], linked: [7, "Linked"], beginUpdate: [8, "BeginUpdate"],
    laneItem: [9, "LaneItem"], endUpdate: [10, "EndUpdate"], nullUpdate: [11, "BeginUpdate"], rejectOp: [12, "RejectOp"],
    acquire: [13, "Acquire"], grant: [14, "Grant"], gone: [15, "Gone"], denied: [16, "Denied"], touched: [17, "Touched"],
    pin: [18, "Pin"], notifyReplicated: [19, "NotifyReplicated"], waitForEpoch: [20, "Witness"],
    announce: [21, "Announce"], deannounce: [22, "Announce"], connectivity: [23, "Connectivity"],
    userMessage: [24, "UserMessage"], backpressure: [26, "Backpressure"],
    update: [27, "Update"], undelivered: [28, "Undelivered"], userQueued: [29, "MessageId"],
    userReceipt: [30, "UserReceipt"],
  },
};

const FIELDS = {};
for (const [name, fields] of Object.entries(SCHEMA)) {
  const listed = Object.entries(fields).map(([key, [number, type, flags = ""]]) => ({
    key, number, type, repeated: flags.includes("r"), present: flags.includes("o"), message: type in SCHEMA,
    wire: { u: 0, U: 0, z: 0, B: 0, F: 1, d: 1 }[type] ?? 2,
  }));
  listed.sort((one, other) => one.number - other.number);
  FIELDS[name] = { listed, byNumber: new Map(listed.map((each) => [each.number, each])) };
}

const DEPTH_MAX = 100;
const DEFAULTS = { u: 0, U: 0n, z: 0, F: 0n, d: 0, B: false, s: "" };

class Writer {
  constructor() {
    this.out = [];
  }
  varint(value) {
    let left = BigInt(value);
    if (left < 128n) return void this.out.push(Number(left));
    while (left > 127n) {
      this.out.push(Number(left & 127n) | 128);
      left >>= 7n;
    }
    this.out.push(Number(left));
  }
  bytes(bytes) {
    this.varint(bytes.length);
    for (const each of bytes) this.out.push(each);
  }
  fixed(write) {
    const data = new Uint8Array(8);
    write(new DataView(data.buffer));
    for (const each of data) this.out.push(each);
  }
  scalar(type, value) {
    if (type === "u" || type === "U") this.varint(value);
    else if (type === "B") this.varint(value ? 1 : 0);
    else if (type === "z") {
      const number = BigInt(value);
      this.varint(number < 0n ? -2n * number - 1n : 2n * number);
    } else if (type === "F") this.fixed((view) => view.setBigUint64(0, BigInt(value), true));
    else if (type === "d") this.fixed((view) => (Number.isNaN(value) ? view.setBigUint64(0, 0x7ff8000000000000n, true) : view.setFloat64(0, value, true)));
    else if (type === "s") this.bytes(TEXT.encode(value));
    else this.bytes(value);
  }
}

export function encode(name, message) {
  const writer = new Writer();
  for (const { key, number, type, repeated, present, message: nested, wire } of FIELDS[name].listed) {
    const value = message[key];
    if (value === undefined || value === null) continue;
    const tag = (number << 3) | wire;
    if (repeated) {
      if (!value.length) continue;
      if (wire === 2) {
        for (const each of value) {
          writer.varint(tag);
          if (nested) writer.bytes(encode(type, each));
          else writer.scalar(type, each);
        }
      } else {
        const packed = new Writer();
        for (const each of value) packed.scalar(type, each);
        writer.varint((number << 3) | 2);
        writer.bytes(packed.out);
      }
    } else if (nested) {
      writer.varint(tag);
      writer.bytes(encode(type, value));
    } else {
      const empty = type === "b" ? !value.length : type === "d" ? Object.is(value, 0) : value == DEFAULTS[type];
      if (empty && !present) continue;
      writer.varint(tag);
      writer.scalar(type, value);
    }
  }
  return Uint8Array.from(writer.out);
}

class Reader {
  constructor(data, at = 0, end = data.length) {
    Object.assign(this, { data, at, end });
  }
  varint() {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      if (this.at >= this.end) throw malformed("it ends too early");
      const byte = this.data[this.at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asUintN(64, value);
    }
    throw malformed("a number without an end");
  }
  length() {
    const size = this.varint();
    if (size > BigInt(this.end - this.at)) throw malformed("it ends too early");
    return Number(size);
  }
  fixed() {
    if (this.at + 8 > this.end) throw malformed("it ends too early");
    this.at += 8;
    return new DataView(this.data.buffer, this.data.byteOffset + this.at - 8, 8);
  }
  scalar(type) {
    if (type === "u") return safe(this.varint());
    if (type === "U") return this.varint();
    if (type === "B") return this.varint() !== 0n;
    if (type === "z") {
      const raw = this.varint();
      const number = raw & 1n ? -((raw + 1n) >> 1n) : raw >> 1n;
      return number >= -MOST && number <= MOST ? Number(number) : number;
    }
    if (type === "F") return this.fixed().getBigUint64(0, true);
    if (type === "d") return this.fixed().getFloat64(0, true);
    const size = this.length();
    const part = this.data.slice(this.at, this.at + size);
    this.at += size;
    if (type === "b") return part;
    try {
      return UNTEXT.decode(part);
    } catch {
      throw malformed("text that is not UTF-8");
    }
  }
  skip(wire) {
    if (wire === 0) this.varint();
    else if (wire === 1) this.fixed();
    else if (wire === 2) this.scalar("b");
    else if (wire === 5 && this.at + 4 <= this.end) this.at += 4;
    else throw malformed("an unknown wire type");
  }
}

const MOST = BigInt(Number.MAX_SAFE_INTEGER);

function safe(value) {
  if (value > MOST) throw malformed("a number that is too large");
  return Number(value);
}

function malformed(why) {
  return new EchoError("E-CORRUPT", `bytes that can't be read: ${why}`);
}

export function decode(name, data, depth = 0) {
  if (depth > DEPTH_MAX) throw malformed("nested too deep");
  const reader = new Reader(data);
  const message = {};
  for (const { key, type, repeated, present, message: nested } of FIELDS[name].listed) {
    if (repeated) message[key] = [];
    else if (!present && !nested) message[key] = type === "b" ? NOTHING : DEFAULTS[type];
  }
  while (reader.at < reader.end) {
    const tag = safe(reader.varint());
    const field = FIELDS[name].byNumber.get(Math.floor(tag / 8));
    const wire = tag % 8;
    if (field === undefined) reader.skip(wire);
    else if (field.repeated && wire === 2 && field.wire !== 2) {
      const end = reader.length() + reader.at;
      const inner = new Reader(data, reader.at, end);
      while (inner.at < inner.end) message[field.key].push(inner.scalar(field.type));
      reader.at = end;
    } else if (wire !== field.wire) reader.skip(wire);
    else {
      const value = field.message ? decode(field.type, reader.scalar("b"), depth + 1) : reader.scalar(field.type);
      if (field.repeated) message[field.key].push(value);
      else message[field.key] = value;
    }
  }
  return message;
}

export function encodeFrame(generation, kind, message) {
  return encode("Frame", { generation, [kind]: message });
}

export function decodeFrame(data) {
  const frame = decode("Frame", data);
  const kind = FIELDS.Frame.listed.find((each) => each.message && frame[each.key] !== undefined);
  if (kind === undefined) throw malformed("a frame without a kind");
  return { generation: frame.generation, kind: kind.key, message: frame[kind.key] };
}

// ---------------------------------------------------------------- values
//
// null, boolean, number (whole ones are integers), bigint, string, Uint8Array, Date, array, plain object, Reference.

export class Reference {
  constructor(item, party = "") {
    this.item = item;
    this.party = party;
  }
}

export class BlobReference {
  constructor(raw) {
    this.raw = raw;
  }
}

export function toValue(value, where = "value") {
  if (value === null) return { null: true };
  if (typeof value === "boolean") return { boolean: value };
  if (typeof value === "bigint") return { integer: value };
  if (typeof value === "number") return Number.isSafeInteger(value) && !Object.is(value, -0) ? { integer: value } : { number: value };
  if (typeof value === "string") {
    if (!value.isWellFormed?.() && /[\ud800-\udfff]/u.test(value)) throw new EchoError("E-USAGE", `${where}: half a character`);
    return { text: value };
  }
  if (value instanceof Uint8Array) return { binary: value };
  if (value instanceof Date) return { timestamp: BigInt(value.getTime()) * 1000n };
  if (value instanceof Reference) return { reference: { item: unhex(value.item), party: unhex(value.party) } };
  if (value instanceof BlobReference) return { blob: value.raw };
  if (value instanceof Item) return { reference: { item: unhex(value.id), party: NOTHING } };
  if (Array.isArray(value)) return { list: { values: value.map((each) => toValue(each, where)) } };
  if (typeof value === "object" && [Object.prototype, null].includes(Object.getPrototypeOf(value))) {
    const keys = Object.keys(value).sort((one, other) => compareBytes(TEXT.encode(one), TEXT.encode(other)));
    return { map: { keys, values: keys.map((key) => toValue(value[key], `${where}.${key}`)) } };
  }
  throw new EchoError("E-USAGE", `${where}: ${typeof value} can't be stored`, "Values are null, booleans, numbers, text, bytes, dates, lists, maps and references.");
}

export function fromValue(message) {
  if (message.text !== undefined) return message.text;
  if (message.boolean !== undefined) return message.boolean;
  if (message.integer !== undefined) return message.integer;
  if (message.number !== undefined) return message.number;
  if (message.null !== undefined) return null;
  if (message.binary !== undefined) return message.binary;
  if (message.timestamp !== undefined) return new Date(Number(BigInt(message.timestamp) / 1000n));
  if (message.list !== undefined) return message.list.values.map(fromValue);
  if (message.reference !== undefined) return new Reference(hex(message.reference.item), hex(message.reference.party));
  if (message.blob !== undefined) return new BlobReference(message.blob);
  if (message.map === undefined || message.map.keys.length !== message.map.values.length) throw malformed("a value without a kind");
  return Object.fromEntries(message.map.keys.map((key, at) => [key, fromValue(message.map.values[at])]));
}

// The total order over values: a nested array whose first element is the kind.
function orderKey(value) {
  if (value === null || value === undefined) return [0];
  if (typeof value === "boolean") return [1, value];
  if (typeof value === "number" || typeof value === "bigint") return Number.isNaN(value) ? [3] : [2, value];
  if (typeof value === "string") return [4, value];
  if (value instanceof Uint8Array) return [5, value];
  if (value instanceof Date) return [6, value.getTime()];
  if (value instanceof Reference) return [7, unhex(value.party), unhex(value.item)];
  if (value instanceof BlobReference) return [8, encode("BlobReference", value.raw)];
  if (Array.isArray(value)) return [9, value.map(orderKey)];
  return [10, Object.keys(value).sort(compareText).map((key) => [key, orderKey(value[key])])];
}

function compareText(one, other) {
  return compareBytes(TEXT.encode(one), TEXT.encode(other)); // the order of code points
}

export function compareKeys(one, other) {
  if (Array.isArray(one)) {
    const shorter = Math.min(one.length, other.length);
    for (let at = 0; at < shorter; at++) {
      const order = compareKeys(one[at], other[at]);
      if (order) return order;
    }
    return one.length - other.length;
  }
  if (typeof one === "string") return compareText(one, other);
  if (one instanceof Uint8Array) return compareBytes(one, other);
  return one < other ? -1 : one > other ? 1 : 0;
}

function sameValue(one, other) {
  return compareKeys(orderKey(one), orderKey(other)) === 0;
}

// ---------------------------------------------------------------- queries

const OPS = { eq: 1, lt: 2, le: 3, gt: 4, ge: 5, in: 6, contains: 7, startswith: 8, exists: 9 };
const ATTRIBUTES = ["item", "type", "model", "parent", "deleted", "source", "target", "created", "view_class"];
const ITEMS_MAX = 10000;

function parseField(name) {
  if (Array.isArray(name)) return { steps: name, attribute: false };
  if (name.startsWith("@")) {
    if (!ATTRIBUTES.includes(name.slice(1))) throw new EchoError("E-USAGE", `${name} is not an attribute of an item`);
    return { steps: [name.slice(1)], attribute: true };
  }
  if (!name || name.split(".").some((each) => !each)) throw new EchoError("E-USAGE", `${name} is not a field`);
  return { steps: name.split("."), attribute: false };
}

function compareWith(field, suffix, value) {
  if (suffix === "ne") return { not: compareWith(field, "eq", value) };
  if (suffix === "exists") return value ? { field, op: OPS.exists } : { not: { field, op: OPS.exists } };
  const constant = (each) => (field.attribute && ["item", "parent"].includes(field.steps[0]) && each !== null ? new Reference(itemId(each)) : each instanceof Item ? new Reference(each.id) : each);
  if (suffix === "in") {
    const distinct = [];
    for (const each of [...value].map(constant).sort((one, other) => compareKeys(orderKey(one), orderKey(other)))) {
      if (!distinct.length || !sameValue(distinct.at(-1), each)) distinct.push(each);
    }
    if (!distinct.length) return { any: [] };
    return distinct.length === 1 ? { field, op: OPS.eq, value: distinct[0] } : { field, op: OPS.in, value: distinct };
  }
  return { field, op: OPS[suffix], value: constant(value) };
}

// { done: false, priority__ge: 3, "address.city": "Rome" } as filters.
function comparisons(conditions) {
  return Object.entries(conditions).map(([keyword, value]) => {
    const at = keyword.lastIndexOf("__");
    const [name, suffix] = at > 0 ? [keyword.slice(0, at), keyword.slice(at + 2)] : [keyword, "eq"];
    if (suffix !== "ne" && !(suffix in OPS)) throw new EchoError("E-USAGE", `${keyword}: ${suffix} is not a comparison`);
    const field = ["item", "type", "parent"].includes(name) ? { steps: [name], attribute: true } : parseField(name);
    return compareWith(field, suffix, value);
  });
}

function structure(filter) {
  if (filter.not) return [1, structure(filter.not)];
  if (filter.all) return [2, filter.all.map(structure)];
  if (filter.any) return [3, filter.any.map(structure)];
  return [0, filter.field.attribute, filter.field.steps, filter.op, orderKey(filter.value)];
}

export function normalise(filter, negated = false) {
  if (filter.not) return normalise(filter.not, !negated);
  if (!filter.all && !filter.any) return negated ? { not: filter } : filter;
  const kind = Boolean(filter.all) !== negated ? "all" : "any";
  const found = [];
  for (const part of (filter.all ?? filter.any).map((each) => normalise(each, negated))) {
    for (const inner of part[kind] ?? [part]) found.push([structure(inner), inner]);
  }
  if (found.some(([, each]) => each[kind === "all" ? "any" : "all"]?.length === 0)) return kind === "all" ? { any: [] } : { all: [] };
  found.sort((one, other) => compareKeys(one[0], other[0]));
  const distinct = found.filter((each, at) => !at || compareKeys(found[at - 1][0], each[0])).map((each) => each[1]);
  return distinct.length === 1 ? distinct[0] : { [kind]: distinct };
}

function filterMessage(filter) {
  if (filter.not) return { negated: filterMessage(filter.not) };
  if (filter.all) return { all: { parts: filter.all.map(filterMessage) } };
  if (filter.any) return { any: { parts: filter.any.map(filterMessage) } };
  const values = filter.op === OPS.in ? filter.value : filter.op === OPS.exists ? [] : [filter.value];
  return { compare: { field: filter.field, op: filter.op, values: values.map((each) => toValue(each)) } };
}

const DELETED_RULES = ["hide", "show", "only"];

// The canonical bytes of { filter, order, limit, deleted }: what `echostore.wire.index_spec` gives for the same question.
export function indexSpec(party, asked) {
  const sealed = asked.sealed ?? false;
  if (asked.item !== undefined) return encode("IndexSpec", { version: 1, party, item: unhex(asked.item), sealed });
  const filter = normalise(asked.filter);
  const everything = filter.all?.length === 0;
  const stage = { step: 1, filter: everything ? undefined : filterMessage(filter), deleted: DELETED_RULES.indexOf(asked.deleted) };
  let order = [];
  for (const each of asked.order) {
    if (!order.some((known) => sameField(known.field, each.field))) order.push(each);
    if (each.field.attribute && each.field.steps[0] === "item") break;
  }
  const last = order.at(-1);
  if (last && last.field.attribute && last.field.steps[0] === "item" && !last.descending) order = order.slice(0, -1);
  return encode("IndexSpec", { version: 1, party, query: { stages: [stage], order, limit: asked.limit ?? 0 }, sealed });
}

function sameField(one, other) {
  return one.attribute === other.attribute && one.steps.join("\0") === other.steps.join("\0");
}

function readField(field, state) {
  if (field.attribute) {
    const name = field.steps[0];
    if (["item", "parent", "source", "target"].includes(name)) return state[name] ? new Reference(state[name]) : null;
    return state[name];
  }
  let value = state.values;
  for (const step of field.steps) {
    if (value === null || typeof value !== "object" || !Object.hasOwn(value, step)) return undefined;
    value = value[step];
  }
  return value;
}

// The time whose text a constant is; without a zone it is UTC. A text compares as a time with values that are times.
function timeNamed(value) {
  if (typeof value !== "string" || !/^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?$/.test(value)) return null;
  const zoned = value.length > 10 && !/(Z|[+-]\d\d:\d\d)$/.test(value) ? `${value}Z` : value;
  const moment = new Date(zoned.replace(" ", "T"));
  return Number.isNaN(moment.getTime()) ? null : moment;
}

export function passes(filter, state) {
  if (filter.not) return !passes(filter.not, state);
  if (filter.all) return filter.all.every((each) => passes(each, state));
  if (filter.any) return filter.any.some((each) => passes(each, state));
  const found = readField(filter.field, state);
  if (filter.op === OPS.exists) return filter.field.attribute ? found !== null : found !== undefined;
  const key = orderKey(found);
  if (filter.op === OPS.in) return filter.value.some((each) => compareKeys(orderKey((found instanceof Date && timeNamed(each)) || each), key) === 0);
  if (filter.op === OPS.contains) {
    if (key[0] === 4) return typeof filter.value === "string" && found.includes(filter.value);
    if (key[0] === 9) return found.some((each) => sameValue(each, filter.value));
    return key[0] === 10 && typeof filter.value === "string" && Object.hasOwn(found, filter.value);
  }
  if (filter.op === OPS.startswith) return typeof found === "string" && typeof filter.value === "string" && found.startsWith(filter.value);
  const time = found instanceof Date ? timeNamed(filter.value) : null;
  const wanted = orderKey(time ?? filter.value);
  if (wanted[0] !== key[0]) return false;
  const order = compareKeys(key, wanted);
  return { [OPS.eq]: order === 0, [OPS.lt]: order < 0, [OPS.le]: order <= 0, [OPS.gt]: order > 0, [OPS.ge]: order >= 0 }[filter.op];
}

function compareStates(order, one, other) {
  for (const { field, descending } of order) {
    const found = compareKeys(orderKey(readField(field, one)), orderKey(readField(field, other)));
    if (found) return descending ? -found : found;
  }
  return one.item < other.item ? -1 : one.item > other.item ? 1 : 0;
}

function fieldsOf(filter) {
  if (filter.not) return fieldsOf(filter.not);
  return filter.all || filter.any ? (filter.all ?? filter.any).flatMap(fieldsOf) : [filter.field];
}

// ---------------------------------------------------------------- index values

export function readItems(value) {
  return decode("IndexValue", value).items.map((each) => ({
    item: hex(each.item), type: each.type, model: each.model, parent: hex(each.parent), deleted: each.deleted,
    source: hex(each.source), target: hex(each.target), values: fromValue(decode("Value", each.state)),
  }));
}

const SEAL_TAG = new TextEncoder().encode("echostore/index-seal/2");

// What a leaf signs, as wire/leaf_signing.py has it: numbers have 8 bytes, and what has a length comes after it.
const SIGNED = {
  number(value) {
    const data = new Uint8Array(8);
    new DataView(data.buffer).setBigUint64(0, BigInt(value));
    return data;
  },
  sized: (data) => joined(SIGNED.number(data.length), data),
  text: (text) => SIGNED.sized(new TextEncoder().encode(text)),
  flag: (value) => Uint8Array.of(value ? 1 : 0),
  system: ({ root, path }) => joined(root, SIGNED.number(path.length), ...path.map(SIGNED.number)),
  arc: ({ system, gen }) => joined(SIGNED.system(system), SIGNED.number(gen)),
  id: ({ sender, stream, seq }) => joined(SIGNED.system(sender), SIGNED.number(stream), SIGNED.number(seq)),
  tag: (what) => new TextEncoder().encode(`echostore:thin-${what}:1\0`),
};

// Of a batch: its arc, its number, that of its first operation, and the hash of all.
export function batchStatement(batch) {
  const { number, sized } = SIGNED;
  const arc = SIGNED.arc(batch.arc);
  const ops = batch.ops.map((op) => joined(arc, number(op.n), sized(op.object), sized(op.delta)));
  return joined(SIGNED.tag("batch"), arc, number(batch.number), number(batch.ops[0]?.n ?? 0), sha256(joined(...ops)));
}

// Of anything else that a leaf says of itself; null for what nobody signs.
export function statement(kind, said) {
  const { number, sized, text, flag, system, arc, id, tag } = SIGNED;
  if (kind === "releaseArc") return joined(tag("release"), arc(said.arc), number(said.batch));
  if (kind === "announce" || kind === "deannounce") {
    const offered = kind === "announce";
    const register = joined(system(said.system), text(said.name), number(said.gen), number(said.seq), flag(offered));
    return joined(tag("service"), register, sized(offered ? said.detail : NOTHING));
  }
  if (kind === "userMessage") {
    const clauses = said.context.map(({ witnesses }) =>
      joined(number(witnesses.length), ...witnesses.map((each) => joined(arc(each.clock), number(each.tick)))));
    const head = joined(id(said.id), number(said.floor), number(said.after), system(said.target), flag(said.crossRoot), text(said.type));
    return joined(tag("message"), head, number(clauses.length), ...clauses, sha256(said.payload));
  }
  if (kind === "userReceipt") return joined(tag("receipt"), id(said.id), system(said.target));
  return null;
}

// What the root's device signs for a sealed value: the items as they are shown, in this order, as the answer to this spec.
export function sealStatement(spec, value) {
  const listed = decode("IndexValue", value).items.map((each) => {
    if (each.record.length ? hex(sha256(each.record)) !== hex(each.hash) : each.hash.length) throw forged("a record is not the one of its hash");
    return joined(each.item, sha256(encode("IndexItem", { ...each, record: NOTHING })));
  });
  return joined(SEAL_TAG, sha256(spec), sha256(joined(...listed)));
}

function forged(why) {
  return new EchoError("E-CORRUPT", `a value was forged on its way: ${why}`, "Connect to another address.");
}

// EchoError unless one of the keys sealed this value as the answer to this spec.
export async function checkSeal(spec, value, keys) {
  const statement = sealStatement(spec, value);
  const { seal } = decode("IndexValue", value);
  for (const raw of seal.length === 64 ? keys : []) {
    let key;
    try {
      key = await crypto.subtle.importKey("raw", raw, "Ed25519", false, ["verify"]);
    } catch (error) {
      throw new EchoError("E-REFUSED", `this browser can't check seals (${error.name})`, "Use one that knows Ed25519.");
    }
    if (await crypto.subtle.verify("Ed25519", key, seal, statement)) return;
  }
  throw forged("its seal is not that of the root");
}

// What a patch makes of a value, byte for byte as the root has it; null when it does not fit.
export function patched(value, patch) {
  try {
    const before = decode("IndexValue", value);
    const change = decode("IndexPatch", patch);
    if (![0, change.upserts.length].includes(change.places.length) || change.removed.length % 16 || change.order.length % 16) return null;
    const old = new Map(before.items.map((each) => [hex(each.item), each]));
    const removed = new Set();
    for (let at = 0; at < change.removed.length; at += 16) removed.add(hex(change.removed.subarray(at, at + 16)));
    if ([...removed].some((each) => !old.has(each))) return null;
    const fresh = new Map();
    for (const each of change.upserts) {
      const known = old.get(hex(each.item)); // type and model never change, so a known item comes without them
      fresh.set(hex(each.item), !each.model && known ? { ...each, type: known.type, model: known.model } : each);
    }
    let items;
    if (change.places.length) {
      items = before.items.filter((each) => !removed.has(hex(each.item)) && !fresh.has(hex(each.item)));
      for (const [at, each] of [...fresh.values()].entries()) {
        if (change.places[at] > items.length) return null;
        items.splice(change.places[at], 0, each);
      }
    } else {
      items = before.items.filter((each) => !removed.has(hex(each.item))).map((each) => fresh.get(hex(each.item)) ?? each);
      items.push(...[...fresh.values()].filter((each) => !old.has(hex(each.item)) || removed.has(hex(each.item))));
    }
    if (change.order.length) {
      const byId = new Map(items.map((each) => [hex(each.item), each]));
      if (change.order.length !== 16 * items.length || byId.size !== items.length) return null;
      items = [];
      for (let at = 0; at < change.order.length; at += 16) items.push(byId.get(hex(change.order.subarray(at, at + 16))));
      if (items.includes(undefined) || new Set(items).size !== items.length) return null;
    }
    if (items.length > ITEMS_MAX) return null;
    return encode("IndexValue", { items, seal: change.seal });
  } catch (error) {
    if (error instanceof EchoError) return null;
    throw error;
  }
}

// ---------------------------------------------------------------- what is held: rules D1 to D8

export const keyOf = (bytes) => {
  let text = "";
  for (const each of bytes) text += String.fromCharCode(each);
  return text;
};

const clockKey = (clock) => `${hex(clock.system.root)}/${clock.system.path.join(".")}#${clock.gen}`;

const ENTRIES_MAX = 10000;

export class Holdings {
  constructor() {
    this.cur = 0;
    this.floor = null;
    this.versions = new Map();
  }
  ended(version) {
    return version.live ? { ...version, max: Math.max(this.cur, version.min) } : version;
  }
  at(key, tick) {
    for (const version of this.versions.get(key) ?? []) {
      if (version.min > tick) continue;
      const ended = this.ended(version);
      if (tick <= ended.max) return ended;
    }
    return null;
  }
  newest(key) {
    const versions = this.versions.get(key);
    return versions?.length ? this.ended(versions[0]) : null;
  }
  learn(key, fact) {
    const kept = [];
    for (const version of this.versions.get(key) ?? []) {
      const ended = this.ended(version);
      if (ended.min <= fact.max && fact.min <= ended.max && sameBytes(ended.value, fact.value)) {
        fact = { min: Math.min(ended.min, fact.min), max: Math.max(ended.max, fact.max), value: fact.value, live: ended.live || fact.live };
      } else kept.push(version);
    }
    kept.push(fact);
    kept.sort((one, other) => other.min - one.min || other.max - one.max);
    this.keep(key, kept);
    if (this.versions.size > ENTRIES_MAX) this.versions.delete(this.versions.keys().next().value);
  }
  subscribe(key, gm) {
    const versions = this.versions.get(key);
    if (!versions) return;
    this.keep(key, versions.map((version) => {
      const ended = this.ended(version);
      return { ...ended, live: ended.min <= gm && gm <= ended.max };
    }));
  }
  end(key) {
    const versions = this.versions.get(key);
    if (versions) this.keep(key, versions.map((version) => ({ ...this.ended(version), live: false })));
  }
  isLive(key) {
    return (this.versions.get(key) ?? []).some((version) => version.live);
  }
  endAll() {
    for (const key of [...this.versions.keys()]) this.end(key);
  }
  keep(key, versions) {
    const floor = this.floor === null ? this.cur : Math.min(this.floor, this.cur);
    this.versions.set(key, versions.filter((version, place) => place === 0 || version.live || version.max >= floor));
  }
}

const TOUCHED_MAX = 1000;

// Which indexes are read here, as the system above is told: it sends deltas of an index only while they cost less than the
// value, counted from the last word that it is read. That word is gathered, except where an index is read and no further
// delta would come without it.
export class Touches {
  constructor() {
    this.read = new Map(); // key -> spec: read since the last word
    this.spent = new Map(); // key -> bytes of deltas since the last word
    this.pressing = new Set();
  }
  // An index is read; whether that should be told at once.
  note(key, spec) {
    if (this.read.size < TOUCHED_MAX) this.read.set(key, spec);
    return this.pressing.has(key);
  }
  // Counts the deltas of an update that was applied.
  received(items, holdings) {
    for (const { delta, invalidate } of items) {
      if (invalidate) this.told(keyOf(invalidate));
      if (!delta) continue;
      const key = keyOf(delta.spec);
      const spent = (this.spent.get(key) ?? 0) + delta.patch.length;
      this.spent.set(key, spent);
      const version = holdings.newest(key);
      if (version !== null && spent + delta.patch.length > version.value.length) this.pressing.add(key);
    }
  }
  // The system above counts from here on: it was told of a read, or gave the value.
  told(key) {
    this.spent.delete(key);
    this.pressing.delete(key);
  }
  // What to tell; it is told then.
  take() {
    const specs = [...this.read.values()];
    for (const key of this.read.keys()) this.told(key);
    this.read.clear();
    return specs;
  }
  // Another link: all is counted anew.
  clear() {
    this.spent.clear();
    this.pressing.clear();
  }
}

// The lower end of the link. Specs are Uint8Arrays; `keyOf` makes them keys.
export class Cache {
  constructor() {
    this.clock = null;
    this.generation = null;
    this.opening = null;
    this.holdings = new Holdings();
    this.wanted = new Map(); // "spec@tick" -> { spec, at, may: whether a hash may be sent along }
    this.notes = new Map();
    this.follows = new Map();
    this.promised = new Set(); // what was granted over this link: its changes are told
  }
  get cur() {
    return this.holdings.cur;
  }
  read(key, at = null) {
    return this.holdings.at(key, at ?? this.cur); // D7
  }
  reached(clock, tick) {
    return tick <= (this.clock !== null && clockKey(clock) === clockKey(this.clock) ? this.cur : this.follows.get(clockKey(clock)) ?? 0);
  }
  open(generation, linked) {
    if (generation !== this.opening || linked.tick < this.cur) return false;
    if (this.clock !== null && clockKey(this.clock) !== clockKey(linked.clock)) return false;
    this.startAfresh();
    Object.assign(this, { clock: linked.clock, generation, opening: null });
    this.holdings.cur = linked.tick;
    this.follow(linked.follows);
    return true;
  }
  close() {
    this.generation = this.opening = null;
    this.startAfresh();
  }
  startAfresh() {
    this.holdings.endAll(); // D8
    this.notes.clear();
    this.promised.clear();
  }
  askAgain() {
    return [...this.wanted.values()].map((each) => this.acquire(each));
  }
  want(spec, at = null) {
    const key = keyOf(spec);
    const name = `${key}@${at ?? ""}`;
    const told = at !== null || this.promised.has(key) || this.holdings.isLive(key);
    if (this.wanted.has(name) || (told && this.read(key, at) !== null)) return null;
    const question = { spec, at, may: true };
    this.wanted.set(name, question);
    return this.acquire(question);
  }
  acquire({ spec, at, may }) {
    const held = may ? this.holdings.newest(keyOf(spec)) : null;
    return { spec, at: at ?? undefined, have: held === null ? undefined : (held.token ??= sha256(held.value)) };
  }
  // True if something was learned, a question if the value that is meant is not held any more.
  grant(grant) {
    const key = keyOf(grant.spec);
    const name = `${key}@${grant.at ?? ""}`;
    const question = this.wanted.get(name);
    if (question === undefined) return false; // D6
    let value = grant.value;
    if (value === undefined) {
      const same = (this.holdings.versions.get(key) ?? []).find((each) => sameBytes(sha256(each.value), grant.same));
      if (same === undefined) {
        question.may = false;
        return this.acquire(question);
      }
      value = same.value;
    }
    this.wanted.delete(name);
    if (grant.at === undefined) this.promised.add(key);
    let fact = { min: grant.min, max: grant.max, value, live: false };
    if (grant.at === undefined) {
      const note = this.notes.get(key); // D5
      this.notes.delete(key);
      if (note && fact.min <= note.gm && note.gm <= fact.max) {
        fact = { ...fact, max: Math.max(fact.max, note.live ? this.cur : note.through), live: note.live };
      }
    }
    this.holdings.learn(key, fact);
    return true;
  }
  denied(spec) {
    const gone = [...this.wanted].filter(([, each]) => sameBytes(each.spec, spec));
    for (const [name] of gone) this.wanted.delete(name);
    this.notes.delete(keyOf(spec));
    return gone.map(([, each]) => each.at);
  }
  // The keys of which something was said; null if it is not this update's turn.
  apply(update) {
    if (this.clock === null || clockKey(update.clock) !== clockKey(this.clock)) return null;
    if (update.prev !== this.cur || update.tick <= update.prev) return null; // D1
    const said = [];
    for (const item of update.items) {
      if (item.subscribed) {
        const key = keyOf(item.subscribed.spec);
        if (this.wanted.has(`${key}@`)) this.notes.set(key, { gm: item.subscribed.gm, through: item.subscribed.gm, live: true }); // D5
        this.holdings.subscribe(key, item.subscribed.gm); // D3
        said.push(key);
      } else if (item.invalidate) {
        this.invalidated(keyOf(item.invalidate));
        said.push(keyOf(item.invalidate));
      } else if (item.delta) {
        const key = keyOf(item.delta.spec);
        const before = this.holdings.at(key, item.delta.gm);
        this.invalidated(key);
        const value = before === null ? null : patched(before.value, item.delta.patch);
        if (value !== null) this.holdings.learn(key, { min: update.tick, max: update.tick, value, live: true });
        said.push(key);
      }
    }
    this.holdings.cur = update.tick; // D4: live values go on by themselves
    this.follow(update.follows);
    return said;
  }
  invalidated(key) {
    const note = this.notes.get(key);
    if (note?.live) this.notes.set(key, { ...note, through: this.cur, live: false });
    this.holdings.end(key); // D2
  }
  follow(follows) {
    for (const { clock, tick } of follows) {
      const key = clockKey(clock);
      if (tick > (this.follows.get(key) ?? 0)) this.follows.set(key, tick);
    }
  }
}

const UPDATE_ITEMS_MAX = 4096;
const UPDATE_BYTES_MAX = 1 << 20; // larger ones travel in parts

// An update that came in one frame, looked at before anything believes it.
function wholeUpdate(update) {
  if (!update.clock?.system || update.prev >= update.tick) throw malformed("an update without a clock, or that leads nowhere");
  if (update.items.length > UPDATE_ITEMS_MAX) throw malformed("too many items in one frame");
  for (const item of update.items) {
    if (item.publishOp) throw malformed("operations do not travel downwards");
    if (!(item.subscribed || item.invalidate || item.delta || item.rejectOp)) throw malformed("an item without a kind");
  }
  return update;
}

// Frames of updates, until they are whole and next. The manifest may overtake its items.
export class UpdateReader {
  constructor() {
    this.clear();
  }
  clear() {
    this.items = new Map();
    this.manifests = new Map();
  }
  take(kind, frame, reached) {
    if (frame.tick <= reached || kind === "beginUpdate") return;
    const name = `${clockKey(frame.clock)}@${frame.tick}`;
    if (kind === "laneItem") {
      const gathered = this.items.get(name) ?? this.items.set(name, new Map()).get(name);
      gathered.set(`${frame.lane}/${frame.index}`, frame);
    } else {
      const lanes = kind === "endUpdate" ? frame.lanes.map((lane, at) => [lane, frame.counts[at]]) : [];
      this.manifests.set(name, { clock: frame.clock, prev: frame.prev, tick: frame.tick, follows: frame.follows ?? [], lanes });
    }
    if (this.items.size > 256 || this.manifests.size > 256) throw malformed("too many updates wait");
  }
  next(reached) {
    for (const [name, manifest] of this.manifests) {
      if (manifest.prev !== reached) continue;
      const gathered = this.items.get(name) ?? new Map();
      const items = [];
      for (const [lane, count] of [...manifest.lanes].sort((one, other) => one[0] - other[0])) {
        for (let index = 0; index < count; index++) items.push(gathered.get(`${lane}/${index}`));
      }
      if (items.includes(undefined)) return null;
      for (const each of [...this.manifests.keys(), ...this.items.keys()]) {
        if (Number(each.slice(each.lastIndexOf("@") + 1)) <= manifest.tick) {
          this.manifests.delete(each);
          this.items.delete(each);
        }
      }
      return { ...manifest, items };
    }
    return null;
  }
}

// ---------------------------------------------------------------- outbox and ids

const ARC_BIT = 1n << 63n;
const ARC_IDS_MAX = (1 << 24) - 1;
const ARC_IDS_LOW = 1 << 20;
const BATCHES_MAX = 10000;
const BATCH_OPS_MAX = 4096;

export class Outbox {
  constructor() {
    this.arc = null; // { arc, base, used }
    this.batches = []; // { arc, number, ops: [{ n, object, delta }] }
    this.numbers = new Map(); // by gen
    this.durable = new Map();
    this.released = new Map();
    this.refused = new Set(); // "gen.n"
  }
  get isShort() {
    return this.arc === null || ARC_IDS_MAX - this.arc.used < ARC_IDS_LOW;
  }
  take(grant) {
    if (this.arc !== null && grant.arc.gen <= this.arc.arc.gen) return null;
    const old = this.arc;
    this.arc = { arc: grant.arc, base: BigInt(grant.base), used: 0 };
    return old === null ? null : this.release(old.arc);
  }
  issue() {
    if (this.arc === null) throw new EchoError("E-REFUSED", "no ids were granted yet", "Connect once; after that ids last while offline.");
    if (this.arc.used >= ARC_IDS_MAX) throw new EchoError("E-REFUSED", "all ids of the arc are used", "Connect, so that more are granted.");
    return ++this.arc.used;
  }
  add(ops) {
    if (!ops.length || ops.length > BATCH_OPS_MAX) throw new EchoError("E-USAGE", `a batch has 1 to ${BATCH_OPS_MAX} operations`);
    if (this.batches.length >= BATCHES_MAX) throw new EchoError("E-REFUSED", `${BATCHES_MAX} batches wait for the root`, "Connect, so that they can be sent.");
    const numbered = ops.map((op) => ({ n: this.issue(), object: op.object, delta: op.delta }));
    const gen = this.arc.arc.gen;
    const number = (this.numbers.get(gen) ?? 0) + 1;
    this.numbers.set(gen, number);
    const batch = { arc: this.arc.arc, number, ops: numbered };
    this.batches = [...this.batches, batch];
    return batch;
  }
  release(arc) {
    if (!this.released.has(arc.gen)) this.released.set(arc.gen, this.numbers.get(arc.gen) ?? 0);
    return { arc, batch: this.released.get(arc.gen) };
  }
  toSend() {
    const waiting = this.batches.filter((each) => each.number > (this.durable.get(each.arc.gen) ?? 0));
    return waiting.filter((each) => each.arc.gen === waiting[0].arc.gen);
  }
  notified(gen, number) {
    if (number <= (this.durable.get(gen) ?? 0) || number > (this.numbers.get(gen) ?? 0)) return false;
    this.durable.set(gen, number);
    return true;
  }
  // What the shown state includes leaves the view on top of it, in the same step.
  followed(reached) {
    const kept = this.batches.filter((each) => each.number > reached(each.arc));
    if (kept.length === this.batches.length) return false;
    for (const each of this.batches) {
      if (!kept.includes(each)) this.durable.set(each.arc.gen, Math.max(this.durable.get(each.arc.gen) ?? 0, each.number));
    }
    this.batches = kept;
    return true;
  }
  reject(gen, n) {
    const later = this.batches.flatMap((batch) => batch.ops.map((op) => ({ name: `${batch.arc.gen}.${op.n}`, object: hex(op.object) })));
    const refused = later.find((each) => each.name === `${gen}.${n}`);
    if (!refused) return { object: "", dependants: 0 }; // the state had it already, and leaves it out by itself
    const same = later.filter((each) => each.object === refused.object);
    const dependants = same[0].name === refused.name ? same.slice(1) : [];
    for (const name of [`${gen}.${n}`, ...dependants.map((each) => each.name)]) this.refused.add(name);
    return { object: refused.object, dependants: dependants.length };
  }
  *overlay() {
    for (const batch of this.batches) for (const op of batch.ops) if (!this.refused.has(`${batch.arc.gen}.${op.n}`)) yield op;
  }
  frames(batch) {
    const ops = batch.ops.map((op) => ({ publishOp: { op: { arc: batch.arc, n: op.n }, object: op.object, delta: op.delta } }));
    const span = { clock: batch.arc, prev: batch.number - 1, tick: batch.number };
    const size = batch.ops.reduce((sum, op) => sum + op.object.length + op.delta.length, 0);
    if (size <= UPDATE_BYTES_MAX) return [["update", { ...span, follows: [], items: ops, batch }]];
    const items = ops.map((op, index) => ["laneItem", { clock: batch.arc, tick: batch.number, lane: 0, index, ...op }]);
    return [["beginUpdate", span], ...items, ["endUpdate", { ...span, follows: [], lanes: [0], counts: [items.length], batch }]];
  }
}

// ---------------------------------------------------------------- operations, and own edits on top of answers

const MODELS = { "property-set": {}, text: { value: "" }, "growable-array": { value: [] }, "threaded-log": { value: [] } };

// Base32 without look-alikes is for people; programs name items by 32 hex digits.
function itemId(value) {
  const id = value instanceof Item ? value.id : value instanceof Reference ? value.item : value instanceof Uint8Array ? hex(value) : value;
  if (typeof id !== "string" || !/^[0-9a-f]{32}$/i.test(id)) throw new EchoError("E-USAGE", "this does not name an item", "Pass an item or its 32 hex digits.");
  return id.toLowerCase();
}

export function operationDelta(feed, item, kind, body) {
  const id = unhex(item);
  const own = sameBytes(id.subarray(0, 8), feed);
  const local = new DataView(id.buffer, id.byteOffset + 8, 8).getBigUint64(0);
  return encode("LeafOperation", { operation: { feed: own ? NOTHING : id.subarray(0, 8), local, [kind]: body } });
}

export function propertyChanges(changes) {
  return {
    changes: changes.map(([path, value]) => {
      const steps = Array.isArray(path) ? path : [path];
      if (!steps.length || steps.some((each) => typeof each !== "string" || !each)) throw new EchoError("E-USAGE", "a property is named by text or a list of texts");
      return value === undefined ? { path: steps, delete: true } : { path: steps, set: toValue(value, steps.join(".")) };
    }),
  };
}

const decodedDeltas = new WeakMap();

function decodedDelta(delta) {
  let found = decodedDeltas.get(delta);
  if (found === undefined) decodedDeltas.set(delta, (found = decode("LeafOperation", delta)));
  return found;
}

function put(values, path, value) {
  for (const step of path.slice(0, -1)) {
    const inner = Object.hasOwn(values, step) ? values[step] : {};
    if (inner === null || typeof inner !== "object" || Object.getPrototypeOf(inner) !== Object.prototype) return false;
    values = values[step] = { ...inner };
  }
  if (value === undefined) delete values[path.at(-1)];
  else values[path.at(-1)] = value;
  return true;
}

// Where an edit belongs in a text that others have changed. Positions count code points.
export function nearest(characters, edit) {
  const before = [...edit.before], wanted = [...before, ...edit.removed];
  const fits = (start) => start >= 0 && start + wanted.length <= characters.length && wanted.every((each, at) => characters[start + at] === each);
  if (edit.position <= characters.length && fits(edit.position - before.length)) return edit.position;
  let best = null;
  if (wanted.length) {
    for (let start = 0; start + wanted.length <= characters.length; start++) {
      const place = start + before.length;
      if (fits(start) && (best === null || Math.abs(place - edit.position) < Math.abs(best - edit.position))) best = place;
    }
  }
  if (best !== null) return best;
  return edit.removed ? null : Math.min(edit.position, characters.length);
}

// One operation on the state of an item; null when it can't be carried out here.
export function applyDelta(state, item, delta, feed) {
  const { operation, text, list } = decodedDelta(delta);
  if (operation?.genesis) {
    const made = operation.genesis;
    return state ?? {
      item, type: made.type, model: made.model, parent: hex(made.parent), deleted: false, source: made.link ? hex(made.link.source) : "",
      target: made.link ? hex(made.link.target) : "", values: structuredClone(MODELS[made.model] ?? {}),
    };
  }
  if (state === null) return null;
  if (text) {
    if (state.model !== "text" || typeof state.values.value !== "string") return null;
    const characters = [...state.values.value];
    const place = nearest(characters, text);
    if (place === null) return null;
    characters.splice(place, [...text.removed].length, ...text.inserted);
    return { ...state, values: { value: characters.join("") } };
  }
  if (list) {
    if (state.model !== "growable-array" || !Array.isArray(state.values.value)) return null;
    const elements = [...state.values.value], removed = list.removed.map(fromValue);
    const place = Math.min(list.position, elements.length);
    if (!removed.every((each, at) => place + at < elements.length && sameValue(each, elements[place + at]))) return null;
    elements.splice(place, removed.length, ...list.inserted.map(fromValue));
    return { ...state, values: { value: elements } };
  }
  if (operation.metadata) {
    const set = operation.metadata.changes.find((each) => each.path.length === 1 && each.path[0] === "deleted");
    return set ? { ...state, deleted: set.set ? fromValue(set.set) === true : false } : state;
  }
  if (operation.placement) return operation.placement.kind === 0 ? { ...state, parent: hex(operation.placement.parent) } : null;
  if (operation.log?.post && state.model === "threaded-log") {
    const reply = operation.log.post.replyTo;
    const shown = {
      id: null, author: hex(feed), time_ms: null, body: fromValue(operation.log.post.body), dangling: false,
      reply_to: reply ? `${hex(reply.feed.length ? reply.feed : feed)}/${reply.seq}/${reply.position}` : null,
    };
    return { ...state, values: { value: [...(state.values.value ?? []), shown] } };
  }
  if (operation.propertySet && state.model === "property-set") {
    const values = { ...state.values };
    for (const { path, set } of operation.propertySet.changes) if (!put(values, path, set ? fromValue(set) : undefined)) return null;
    return { ...state, values };
  }
  return null;
}

const ROOT_KNOWS = ["created", "view_class"];

// An answer with own operations on top: { items, pending }. What only the root can know is marked, not guessed.
export function view(asked, items, operations, feed, known = () => undefined) {
  const byItem = new Map();
  for (const op of operations) {
    const item = hex(op.object);
    byItem.set(item, [...(byItem.get(item) ?? []), op.delta]);
  }
  if (!byItem.size) return { items, pending: false };
  let pending = false;
  const apply = (item, state) => {
    for (const delta of byItem.get(item)) {
      const after = applyDelta(state, item, delta, feed);
      if (after === null) pending = true;
      else state = after;
    }
    return state;
  };
  if (asked.item !== undefined) {
    const state = byItem.has(asked.item) ? apply(asked.item, items[0] ?? null) : items[0] ?? null;
    return { items: state === null ? [] : [state], pending };
  }
  const filter = normalise(asked.filter);
  if ([...fieldsOf(filter), ...asked.order.map((each) => each.field)].some((each) => each.attribute && ROOT_KNOWS.includes(each.steps[0]))) {
    return { items, pending: true };
  }
  const states = new Map(items.map((each) => [each.item, each]));
  for (const item of byItem.keys()) {
    const after = apply(item, states.get(item) ?? known(item) ?? null);
    if (after !== null) states.set(item, after);
  }
  const deleted = new Set([...states.values()].filter((each) => each.deleted).map((each) => each.item));
  let shown = [];
  for (let state of states.values()) {
    if (state.parent && deleted.has(state.parent) && !state.deleted) state = { ...state, deleted: true };
    const visible = asked.deleted === "show" || state.deleted === (asked.deleted === "only");
    if (visible && passes(filter, state)) shown.push(state);
  }
  shown.sort((one, other) => compareStates(asked.order, one, other));
  if (asked.limit) {
    pending = pending || (items.length === asked.limit && shown.length < asked.limit);
    shown = shown.slice(0, asked.limit);
  }
  return { items: shown, pending };
}

// ---------------------------------------------------------------- storage

// In memory: a leaf that ends is a new one next time.
export class MemoryStorage {
  constructor() {
    this.state = null;
  }
  async load() {
    return this.state;
  }
  async save(state) {
    this.state = structuredClone(state);
  }
  close() {}
}

// In the browser's IndexedDB. A tab takes the first slot that no other tab has: two would issue the same ids.
export class IndexedDbStorage {
  static async open(name) {
    const storage = new IndexedDbStorage();
    for (let slot = 0; slot < 64; slot++) {
      if (await storage.take(`${name}/${slot}`)) return storage;
    }
    throw new EchoError("E-LOCKED", "too many tabs have this party open", "Close some.");
  }
  async take(name) {
    const got = await new Promise((resolve, reject) => {
      navigator.locks.request(`echostore/${name}`, { ifAvailable: true }, (lock) => {
        resolve(lock !== null);
        return lock === null ? null : new Promise((release) => (this.close = release));
      }).catch(reject);
    });
    if (!got) return false;
    this.database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open(`echostore/${name}`, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("leaf");
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(new EchoError("E-STORAGE", `the browser keeps nothing: ${opening.error}`));
    });
    return true;
  }
  load() {
    return this.run("readonly", (store) => store.get("state"));
  }
  save(state) {
    return this.run("readwrite", (store) => store.put(state, "state"));
  }
  run(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction("leaf", mode, mode === "readwrite" ? { durability: "strict" } : {});
      const request = work(transaction.objectStore("leaf"));
      transaction.oncomplete = () => resolve(request.result ?? null);
      transaction.onabort = transaction.onerror = () => reject(new EchoError("E-STORAGE", `the browser keeps nothing: ${transaction.error}`));
    });
  }
}

// ---------------------------------------------------------------- the machine

const WINDOW = 2048;

function pairs(map) {
  return [...map.entries()];
}

// A leaf without sockets and clocks. `send(kind, message)` is called for what goes up, `changed(keys | null)` when answers may be others.
export class LeafMachine {
  constructor({ send, changed, told, delivered, lost, givenUp = () => undefined }) {
    Object.assign(this, { send, changed, told, delivered, lost, givenUp });
    this.cache = new Cache();
    this.reader = new UpdateReader();
    this.outbox = new Outbox();
    this.system = null;
    this.nonce = null;
    this.pins = [];
    this.waits = new Map(); // clock key -> { clock, tick }
    this.seqs = new Map();
    this.unreceived = new Map(); // "stream.seq" -> message
    this.windows = new Map(); // sender and stream -> { mark, above }
    this.held = [];
    this.offers = new Map(); // name -> { seq, detail }
    this.rejections = new Map(); // "gen.n" -> what was told of that operation: once, however often it comes
    this.slowUntil = 0;
    this.touches = new Touches();
  }

  state() {
    const { cache, outbox } = this;
    return {
      format: 1, cur: cache.cur, clock: cache.clock, follows: pairs(cache.follows), system: this.system, arc: outbox.arc, batches: outbox.batches,
      numbers: pairs(outbox.numbers), durable: pairs(outbox.durable), released: pairs(outbox.released), refused: [...outbox.refused],
      seqs: pairs(this.seqs), unreceived: pairs(this.unreceived), windows: pairs(this.windows),
      rejections: pairs(this.rejections),
    };
  }

  restore(state) {
    if (state.format !== 1) throw new EchoError("E-CORRUPT", "what the browser keeps is of a later version");
    this.cache.holdings.cur = state.cur;
    this.cache.clock = state.clock;
    this.cache.follows = new Map(state.follows);
    this.system = state.system;
    Object.assign(this.outbox, {
      arc: state.arc, batches: state.batches, numbers: new Map(state.numbers), durable: new Map(state.durable),
      released: new Map(state.released), refused: new Set(state.refused),
    });
    this.rejections = new Map(state.rejections ?? []);
    this.seqs = new Map(state.seqs);
    this.unreceived = new Map(state.unreceived);
    this.windows = new Map(state.windows);
  }

  get linked() {
    return this.cache.generation !== null;
  }

  opening(generation, nonce) {
    this.closed();
    this.cache.opening = generation;
    this.nonce ??= nonce;
    this.attach();
  }

  attach() {
    const generation = this.cache.opening ?? this.cache.generation;
    this.send("attach", { nonce: this.nonce, system: this.system ?? undefined, wantsArc: this.outbox.isShort, seen: this.cache.cur }, generation);
  }

  closed() {
    this.cache.close();
    this.reader.clear();
  }

  up(kind, message) {
    if (this.linked) this.send(kind, message, this.cache.generation);
  }

  want(spec, at = null) {
    const question = this.cache.want(spec, at);
    if (question !== null) this.up("acquire", question);
  }

  isWanted(spec, at = null) {
    return this.cache.wanted.has(`${keyOf(spec)}@${at ?? ""}`);
  }

  publish(ops) {
    const batch = this.outbox.add(ops);
    this.changed(null);
    return batch;
  }

  sendBatch(batch) {
    if (this.outbox.toSend().includes(batch)) for (const [kind, message] of this.outbox.frames(batch)) this.up(kind, message);
  }

  waitFor(context) {
    for (const clause of context) {
      if (clause.some((each) => this.cache.reached(each.clock, each.tick))) continue;
      const { clock, tick } = clause[0];
      this.waits.set(clockKey(clock), { clock, tick: Math.max(tick, this.waits.get(clockKey(clock))?.tick ?? 0) });
      this.up("waitForEpoch", { clock, tick });
    }
  }

  waited(context) {
    return context.every((clause) => clause.some((each) => this.cache.reached(each.clock, each.tick)));
  }

  pin(pins) {
    this.pins = pins;
    const oldest = pins.length ? Math.min(...pins) : null;
    this.cache.holdings.floor = oldest;
    this.up("pin", { tick: oldest ?? undefined });
  }

  post(target, stream, type, payload, context) {
    if (this.system === null) throw new EchoError("E-REFUSED", "this leaf has no name yet", "Connect once.");
    const crossRoot = hex(target.root) !== hex(this.system.root);
    if (crossRoot) stream += CROSS_ROOT_STREAMS;
    const seq = (this.seqs.get(stream) ?? 0) + 1;
    if ([...this.unreceived.keys()].filter((each) => each.startsWith(`${stream}.`)).length >= 1024) {
      throw new EchoError("E-REFUSED", "too many messages are on their way", "Wait until some have arrived.");
    }
    this.seqs.set(stream, seq);
    const message = { id: { sender: this.system, stream, seq }, floor: 0, target, context: context.map((witnesses) => ({ witnesses })), type, payload, crossRoot };
    this.unreceived.set(`${stream}.${seq}`, message);
    return message;
  }

  withFloor(message) {
    const { stream, seq } = message.id;
    const open = [...this.unreceived.values()].filter((each) => each.id.stream === stream);
    const before = open.filter((each) => each.id.seq < seq && systemText(each.target) === systemText(message.target));
    const after = message.crossRoot ? Math.max(0, ...before.map((each) => each.id.seq)) : 0;
    return { ...message, floor: Math.min(...open.map((each) => each.id.seq)), after };
  }

  offer(name, detail) {
    this.offers.set(name, { seq: (this.offers.get(name)?.seq ?? 0) + 1, detail });
    this.announce();
  }

  announce() {
    if (this.system === null) return;
    const gen = this.outbox.arc?.arc.gen ?? 0;
    for (const [name, { seq, detail }] of [...this.offers].sort()) {
      this.up(detail === null ? "deannounce" : "announce", { system: this.system, name, gen, seq, detail: detail ?? NOTHING });
    }
  }

  get isAsking() {
    return this.cache.opening !== null || this.cache.wanted.size > 0 || this.waits.size > 0 || this.unreceived.size > 0 || this.outbox.toSend().length > 0 || this.outbox.isShort;
  }

  askAgain() {
    if (this.cache.opening !== null) return this.attach();
    if (!this.linked) return;
    for (const each of this.cache.askAgain()) this.up("acquire", each);
    for (const { clock, tick } of this.waits.values()) this.up("waitForEpoch", { clock, tick });
    if (this.outbox.isShort && this.nonce !== null) this.attach();
    for (const batch of this.outbox.toSend()) for (const [kind, message] of this.outbox.frames(batch)) this.up(kind, message);
    for (const gen of this.outbox.released.keys()) this.up("releaseArc", { arc: { system: this.system, gen }, batch: this.outbox.released.get(gen) });
    for (const message of this.unreceived.values()) this.up("userMessage", this.withFloor(message));
    this.announce();
    if (this.pins.length) this.up("pin", { tick: Math.min(...this.pins) });
  }

  // One frame from above. Throws EchoError when no honest system says such a thing.
  receive({ generation, kind, message }) {
    const { cache, outbox } = this;
    if (kind === "linked") {
      if (!cache.open(generation, message)) return;
      this.touches.clear();
      for (const each of message.rejected) this.rejected(each);
      this.followed();
      if (!outbox.isShort) this.nonce = null;
      this.askAgain();
      this.changed(null);
      return this.deliver();
    }
    const early = ["grantSystemId", "grantArc", "notifyReplicated"].includes(kind);
    if (generation !== cache.generation && !(early && generation === cache.opening)) return; // D1
    if (kind === "grantSystemId") {
      if (message.nonce === this.nonce) this.system = message.system;
    } else if (kind === "grantArc") {
      if (this.system === null || clockKey({ system: this.system, gen: 0 }) !== clockKey({ system: message.arc.system, gen: 0 })) return;
      const release = outbox.take(message);
      if (cache.opening === null) this.nonce = null;
      if (release !== null) this.up("releaseArc", release);
      this.changed(new Set());
    } else if (kind === "attached") {
      if (message.turn.length || message.tick > cache.cur) return;
      const own = (clock) => this.system !== null && clockKey({ system: clock.system, gen: 0 }) === clockKey({ system: this.system, gen: 0 });
      cache.follow(message.follows.filter((each) => !own(each.clock))); // of its own a leaf hears with the tick alone
      this.changed(new Set());
      this.deliver();
    } else if (kind === "update") {
      this.update(wholeUpdate(message));
    } else if (["beginUpdate", "laneItem", "endUpdate", "nullUpdate"].includes(kind)) {
      if (message.publishOp) throw malformed("operations do not travel downwards");
      this.reader.take(kind, message, cache.cur);
      for (let update; (update = this.reader.next(cache.cur)) !== null; ) this.update(update);
    } else if (kind === "grant") {
      if ((message.at ?? null) === null) this.touches.told(keyOf(message.spec));
      const taken = cache.grant(message);
      if (taken === true) this.changed(new Set([keyOf(message.spec)]));
      else if (taken) this.up("acquire", taken);
    } else if (kind === "gone") {
      if (cache.wanted.delete(`${keyOf(message.spec)}@${message.at}`)) this.lost(message.spec, message.at, message.oldest, null);
    } else if (kind === "denied") {
      for (const at of cache.denied(message.spec)) this.lost(message.spec, at, null, message.reason);
    } else if (kind === "notifyReplicated") {
      const before = outbox.toSend();
      if (outbox.notified(message.clock.gen, message.batch)) {
        for (const batch of outbox.toSend()) if (!before.includes(batch)) this.sendBatch(batch);
        this.changed(new Set());
      }
    } else if (kind === "rejectOp") {
      this.rejected(message);
      this.changed(null);
    } else if (kind === "userMessage") {
      if (this.held.length < 10000 && !this.held.some((each) => messageName(each) === messageName(message))) this.held.push(message);
      this.deliver();
    } else if (kind === "userReceipt") {
      const sent = this.unreceived.get(`${message.id.stream}.${message.id.seq}`);
      if (sent === undefined || systemText(sent.target) !== systemText(message.target)) return; // only the target's word counts
      this.unreceived.delete(`${message.id.stream}.${message.id.seq}`);
      this.changed(new Set());
    } else if (kind === "undelivered") {
      const given = this.unreceived.get(`${message.id.stream}.${message.id.seq}`);
      if (given !== undefined) {
        this.unreceived.delete(`${message.id.stream}.${message.id.seq}`);
        this.givenUp(given, message.reason);
        this.changed(new Set());
      }
    } else if (kind === "backpressure") {
      this.slowUntil = Date.now() + 1000 * Math.min(3600, Math.max(0, message.retryAfterS));
    }
  }

  sayWhatIsRead() {
    if (this.linked) this.up("touched", { specs: this.touches.take() });
  }

  update(update) {
    const said = this.cache.apply(update);
    if (said === null) return;
    this.touches.received(update.items, this.cache.holdings);
    const rejected = update.items.filter((each) => each.rejectOp);
    for (const each of rejected) this.rejected(each.rejectOp);
    const batches = this.followed();
    this.changed(batches || rejected.length ? null : new Set(said));
    this.deliver();
  }

  rejected({ op, reason, object }) {
    const name = `${op.arc.gen}.${op.n}`;
    const own = this.system !== null && clockKey({ system: this.system, gen: 0 }) === clockKey({ system: op.arc.system, gen: 0 });
    if (!own || this.rejections.has(name)) return;
    const taken = this.outbox.reject(op.arc.gen, op.n);
    const rejection = { object: object.length ? hex(object) : taken.object, dependants: taken.dependants, reason };
    this.rejections.set(name, rejection);
    for (const oldest of this.rejections.keys()) {
      if (this.rejections.size <= 1000) break;
      this.rejections.delete(oldest);
    }
    this.told(rejection);
  }

  followed() {
    for (const [key, { clock, tick }] of this.waits) if (this.cache.reached(clock, tick)) this.waits.delete(key);
    return this.outbox.followed((arc) => this.cache.follows.get(clockKey(arc)) ?? 0);
  }

  deliver() {
    const ready = this.held.filter((each) => this.waited(each.context.map((clause) => clause.witnesses)));
    this.held = this.held.filter((each) => !ready.includes(each));
    for (const message of ready) {
      if (this.isNew(message)) this.delivered(message);
      this.up("userReceipt", { id: message.id, target: message.target });
    }
  }

  isNew({ id, floor }) {
    const key = `${clockKey({ system: id.sender, gen: 0 })}/${id.stream}`;
    const window = this.windows.get(key) ?? { mark: 0, above: [] };
    let mark = Math.max(window.mark, floor - 1);
    if (id.seq <= window.mark || window.above.includes(id.seq) || id.seq > mark + WINDOW || id.seq < floor) return false;
    const above = new Set([...window.above.filter((each) => each > mark), id.seq]);
    while (above.delete(mark + 1)) mark++;
    this.windows.set(key, { mark, above: [...above].filter((each) => each > mark) });
    return true;
  }
}

function messageName(message) {
  return `${clockKey({ system: message.id.sender, gen: message.id.stream })}/${message.id.seq}`;
}

// ---------------------------------------------------------------- connections

const SUBPROTOCOL = "echostore-coherence-3";
const PROOF_TAG = TEXT.encode("echostore:thin:1\0");
const CROSS_ROOT_STREAMS = 2 ** 32;
const LINK_MS = 10000;
const ASK_MS = 1000;
const ASK_MS_MAX = 30000;
const RETRY_MS = 100;
const RETRY_MS_MAX = 10000;

export async function connect(urls, capability, { storage, timeoutMs = 10000, webSocket = globalThis.WebSocket } = {}) {
  let bytes, key, sealers;
  try {
    bytes = capability instanceof Uint8Array ? capability : unbase64url(capability);
    const body = decode("CapabilityBody", decode("Capability", bytes).body);
    key = body.party;
    sealers = body.sealers.length ? body.sealers : [body.issuer];
  } catch {
    key = NOTHING;
  }
  if (key.length !== 32) throw new EchoError("E-USAGE", "this is not a capability", "Paste what `party capability issue` printed.");
  const lasting = globalThis.indexedDB && globalThis.navigator?.locks;
  storage ??= lasting ? await IndexedDbStorage.open(hex(sha256(bytes)).slice(0, 32)) : new MemoryStorage();
  const party = new Party(typeof urls === "string" ? [urls] : [...urls], bytes, key, storage, webSocket, timeoutMs);
  party.sealers = sealers;
  await party.start();
  return party;
}

// ---------------------------------------------------------------- what an application touches

// One party behind one connection.
export class Party {
  constructor(urls, capability, key, storage, webSocket, timeoutMs) {
    Object.assign(this, { urls, capability, key, storage, webSocket, timeoutMs });
    this.feed = null;
    this.url = null;
    this.lastError = null;
    this.rights = [];
    this.refused = null;
    this.ended = false;
    this.counts = { links: 0, questions: 0 };
    this.answers = new Map(); // spec key -> answer
    this.decoded = new Map();
    this.unsealed = new Map(); // spec key -> the value whose seal was found good
    this.known = new Map();
    this.reads = new Map(); // "spec@tick" -> { spec, at, waiting }
    this.conditions = [];
    this.watches = new Set();
    this.listeners = new Set();
    this.open = null;
    this.undelivered = [];
    this.onMessageFn = null;
    this.onRejectedFn = null;
    this.onUndeliveredFn = null;
    this.signs = false;
    this.saying = Promise.resolve();
    this.saving = Promise.resolve();
    this.dirty = false;
    this.askWait = ASK_MS;
    this.askAt = 0;
    this.machine = new LeafMachine({
      send: (kind, message, generation) => this.say(kind, message, generation),
      givenUp: (message, reason) => {
        this.dirty = true;
        this.onUndeliveredFn?.({ target: systemText(message.target), type: message.type, reason });
      },
      changed: (keys) => this.changed(keys),
      told: (rejection) => this.onRejectedFn?.(rejection),
      delivered: (message) => {
        const shown = { sender: systemText(message.id.sender), type: message.type, payload: message.payload };
        if (this.onMessageFn) this.save().then(() => this.onMessageFn(shown));
        else this.undelivered = [...this.undelivered, shown].slice(-1000);
      },
      lost: (spec, at, oldest, reason) => this.lost(spec, at, oldest, reason),
    });
  }

  // reading

  query(conditions = {}) {
    return new Query(this, { filter: { all: comparisons(conditions) }, order: [], limit: 0, deleted: "hide" });
  }

  async get(item, { sealed = false } = {}) {
    const found = await this.answer({ item: itemId(item), sealed });
    if (!found.length) throw new EchoError("E-NOT-FOUND", "this item is not in the party");
    return found[0];
  }

  // Runs `work` with reads of one state; again when that state is forgotten above.
  async transaction(work) {
    for (let round = 0; round < 8; round++) {
      const tick = this.machine.cache.cur;
      const operations = [...this.machine.outbox.overlay()];
      this.machine.pin([...this.machine.pins, tick]);
      let oldest;
      try {
        return await work({
          tick,
          all: (query) => this.answerAt(query.asked, tick, operations),
          get: async (item) => (await this.answerAt({ item: itemId(item) }, tick, operations))[0] ?? null,
        });
      } catch (error) {
        if (error.code !== "E-GONE") throw error;
        oldest = error.oldest;
      } finally {
        const pins = [...this.machine.pins];
        pins.splice(pins.indexOf(tick), 1);
        this.machine.pin(pins);
      }
      await this.acquire([[{ clock: this.machine.cache.clock, tick: oldest }]]);
    }
    throw new EchoError("E-TIMEOUT", "the state of a transaction was forgotten again and again", "Read less in one.");
  }

  // writing

  // The first argument is the item's own: model, type and parent. Properties, of any name, are the second.
  create({ model = "property-set", type = "", parent = null, ...unknown } = {}, properties = {}) {
    const [stray] = Object.keys(unknown);
    if (stray !== undefined) throw new EchoError("E-USAGE", `${stray} is not model, type or parent`, `Write create({ type }, { ${stray}: ... }) for a property.`);
    if (!(model in MODELS)) throw new EchoError("E-USAGE", `${model} is not a model that a leaf can make`, `Models are ${Object.keys(MODELS).join(", ")}.`);
    return this.make({ model, version: 1, type, parent: parent === null ? NOTHING : unhex(itemId(parent)) }, properties);
  }

  link(source, target, type = "link", properties = {}) {
    const link = { source: unhex(itemId(source)), target: unhex(itemId(target)) };
    return this.make({ model: "property-set", version: 1, type, link }, properties);
  }

  make(genesis, properties) {
    this.checkOpen();
    if (Object.keys(properties).length && genesis.model !== "property-set") throw new EchoError("E-USAGE", `a ${genesis.model} has no properties`);
    const changes = Object.entries(properties);
    const body = propertyChanges(changes);
    const n = this.machine.outbox.issue();
    const id = new Uint8Array(16);
    id.set(this.feed);
    new DataView(id.buffer).setBigUint64(8, ARC_BIT | (this.machine.outbox.arc.base + BigInt(n)));
    const item = hex(id);
    const ops = [{ object: id, delta: operationDelta(this.feed, item, "genesis", genesis) }];
    if (changes.length) ops.push({ object: id, delta: operationDelta(this.feed, item, "propertySet", body) });
    this.publish(ops);
    return new Item(this, ops.reduce((state, op) => applyDelta(state, item, op.delta, this.feed), null));
  }

  publish(ops) {
    this.checkOpen();
    if (this.open !== null) return void this.open.push(...ops);
    const batch = this.machine.publish(ops);
    // On disk before anybody else sees it: ids are never issued twice.
    this.save().then(() => this.machine.sendBatch(batch), (error) => this.fail(error));
  }

  // All that `work` writes is one batch; nothing of it is written when it throws.
  batch(work) {
    if (this.open !== null) return work();
    this.open = [];
    let ops;
    try {
      work();
      ops = this.open;
    } finally {
      this.open = null;
    }
    if (ops.length) this.publish(ops);
  }

  // Own operations that have no effect, also such as the party left out later: the newest thousand.
  get rejections() {
    return [...this.machine.rejections.values()];
  }

  onRejected(fn) {
    this.onRejectedFn = fn;
  }

  // fences

  async fence(kind = "full", context = null) {
    if (!["release", "acquire", "full"].includes(kind)) throw new EchoError("E-USAGE", `a fence is release, acquire or full, not ${kind}`);
    if (kind !== "acquire") await this.until(() => this.machine.outbox.batches.length === 0, "the root did not confirm all batches");
    if (kind === "full") {
      const own = this.ownClocks();
      const spec = this.newQuestion(hex(crypto.getRandomValues(new Uint8Array(16))));
      await this.read(spec); // nobody has asked this before: the root answers it, at its newest tick
      this.machine.cache.holdings.versions.delete(keyOf(spec));
      await this.acquire(own);
    }
    if (kind !== "release" && context !== null) await this.acquire(readContext(context));
  }

  context() {
    const clock = this.machine.cache.clock;
    const clauses = clock === null ? this.ownClocks() : [...this.ownClocks(), [{ clock, tick: this.machine.cache.cur }]];
    return JSON.stringify(clauses.map((clause) => clause.map(({ clock: each, tick }) => [systemText(each.system), each.gen, tick])));
  }

  // Of an item that is not there, in a form that the capability allows.
  newQuestion(nobody) {
    if (!this.rights.length || this.rights.some((each) => each.all_items)) return indexSpec(this.key, { item: nobody });
    const type = this.rights.find((each) => each.types.length)?.types[0] ?? "none";
    return this.query({ type, item: nobody }).spec;
  }

  ownClocks() {
    return [...this.machine.outbox.numbers].filter(([, tick]) => tick).map(([gen, tick]) => [{ clock: { system: this.machine.system, gen }, tick }]);
  }

  async acquire(context) {
    if (!context.length) return;
    this.machine.waitFor(context);
    await this.until(() => this.machine.waited(context), "what was waited for did not come");
  }

  // other applications

  get system() {
    return this.machine.system === null ? null : systemText(this.machine.system);
  }

  send(target, type, payload, { stream = 0, context = null } = {}) {
    this.checkOpen();
    if (!(payload instanceof Uint8Array) || typeof type !== "string") throw new EchoError("E-USAGE", "a message is a type and bytes");
    const message = this.machine.post(parseSystem(target), stream, type, payload, context === null ? [] : readContext(context));
    this.save().then(() => this.machine.up("userMessage", this.machine.withFloor(message)), (error) => this.fail(error));
  }

  onMessage(fn) {
    this.onMessageFn = fn;
    for (const each of this.undelivered.splice(0)) fn(each);
  }

  announce(name, detail = NOTHING) {
    this.machine.offer(name, detail);
  }

  deannounce(name) {
    this.machine.offer(name, null);
  }

  async services(prefix = "") {
    const version = await this.read(TEXT.encode(`services/${prefix}`));
    const lines = UNTEXT.decode(version.value).split("\n").filter((each) => each);
    return lines.map((line) => {
      const [root, path, name, detail] = line.split(" ");
      return { system: `${root}/${path}`, name: UNTEXT.decode(unhex(name)), detail: unhex(detail) };
    });
  }

  // the connection

  get connected() {
    return this.machine.linked;
  }

  get tick() {
    return this.machine.cache.cur;
  }

  get pending() {
    return this.machine.outbox.batches.length;
  }

  status() {
    return {
      connected: this.connected, url: this.url, system: this.system, tick: this.tick, indexes: this.machine.cache.holdings.versions.size,
      outbox: this.pending, unsent: this.machine.outbox.toSend().length, rejected: this.machine.rejections.size,
      lastError: this.lastError?.what ?? null, ...this.counts,
    };
  }

  // Calls `fn` whenever something that status() tells may have changed; the function that ends this.
  onStatus(fn) {
    this.listeners.add(fn);
    return () => this.listeners.delete(fn);
  }

  async close() {
    if (this.ended) return;
    this.ended = true;
    clearInterval(this.beat);
    clearTimeout(this.retry);
    this.fail(new EchoError("E-CLOSED", "this connection is closed"));
    this.socket?.close(1000);
    await this.save().catch(() => undefined); // a browser that keeps nothing has said so before
    this.storage.close();
  }

  // Break the connection, as a lost network would; `goOnline` ends it.
  goOffline() {
    this.offline = true;
    clearTimeout(this.retry);
    this.socket?.close(1000);
    this.dropped();
  }

  goOnline() {
    this.offline = false;
    this.connectNext(0);
  }

  // inside

  async start() {
    const state = await this.storage.load();
    if (state !== null && state !== undefined) {
      this.machine.restore(state);
      this.feed = state.feed ?? null;
      this.signing = state.signing;
    }
    this.signing ??= await newKey();
    this.beat = setInterval(() => this.onBeat(), 500);
    this.beat.unref?.();
    this.place = 0;
    this.wait = RETRY_MS;
    this.connectNext(0);
    if (this.machine.outbox.arc === null) {
      try {
        await this.until(() => this.connected && this.machine.outbox.arc !== null, "no connection");
      } catch (error) {
        await this.close();
        throw error;
      }
    }
    await this.save();
  }

  connectNext(delayMs) {
    clearTimeout(this.retry);
    if (this.ended || this.offline || this.refused) return;
    this.retry = setTimeout(() => this.connectTo(this.urls[this.place % this.urls.length]), delayMs);
  }

  connectTo(url) {
    if (this.ended || this.offline || this.socket) return;
    let socket;
    try {
      socket = new this.webSocket(url, SUBPROTOCOL);
    } catch (error) {
      this.fail((this.refused = new EchoError("E-USAGE", `${url} is not the address of a thin service`)));
      return;
    }
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    let step = 0, generation = null, wasLinked = false;
    const giveUp = setTimeout(() => !this.machine.linked && socket.close(1000), LINK_MS);
    giveUp.unref?.();
    socket.onmessage = async ({ data }) => {
      try {
        if (step === 0) {
          const hello = JSON.parse(data);
          if (hello.hello !== 1) throw new EchoError("E-UNREACHABLE", `${url} speaks another protocol`);
          step = 1;
          const proof = await sign(this.signing, joined(PROOF_TAG, unhex(hello.nonce), sha256(this.capability)));
          socket.send(JSON.stringify({ capability: base64url(this.capability), key: hex(this.signing.public), proof: hex(proof) }));
        } else if (step === 1) {
          const answer = JSON.parse(data);
          if (answer.ok !== true) {
            const error = new EchoError("E-CAPABILITY", `the capability is refused (${answer.refused})`, "Ask a member of the party for another one.");
            (this.refusedBy ??= new Set()).add(url);
            this.lastError = error;
            if (this.refusedBy.size >= new Set(this.urls).size) this.fail((this.refused = error));
            socket.close(1000);
            return;
          }
          step = 2;
          this.refusedBy?.clear();
          const root = this.machine.cache.clock?.system.root ?? this.machine.system?.root;
          if (root && hex(root) !== answer.root) throw new EchoError("E-UNREACHABLE", `${url} serves another root than the one this leaf has its ids from`);
          this.feed = unhex(answer.feed);
          this.url = url;
          this.rights = answer.read ?? [];
          this.signs = answer.sign === true;
          generation = BigInt(answer.generation);
          this.machine.opening(generation, randomNonce());
        } else {
          const before = this.machine.linked;
          this.machine.receive(decodeFrame(new Uint8Array(data)));
          if (this.machine.linked && !before) {
            wasLinked = true;
            this.wait = RETRY_MS;
            this.counts.links++;
            this.askAt = Date.now() + ASK_MS;
            for (const watch of this.watches) watch.hold();
            this.tellStatus();
          }
        }
      } catch (error) {
        this.lastError = error instanceof EchoError ? error : new EchoError("E-UNREACHABLE", `${url}: ${error.message}`);
        socket.close(1000);
        if (!(error instanceof EchoError) && !(error instanceof SyntaxError)) throw error;
      }
    };
    socket.onclose = ({ code, reason }) => {
      clearTimeout(giveUp);
      if (this.socket !== socket) return;
      if (code === 4401 || code === 4403) {
        this.fail((this.refused = new EchoError("E-CAPABILITY", `the capability is refused (${reason || code})`)));
      } else if (!wasLinked) {
        this.lastError ??= new EchoError("E-UNREACHABLE", `${url} can't be reached`);
        this.place++;
      }
      this.dropped();
      this.connectNext(this.wait * (0.5 + Math.random()));
      this.wait = Math.min(2 * this.wait, RETRY_MS_MAX);
    };
    socket.onerror = () => undefined; // a close follows, and tells
  }

  dropped() {
    this.socket = null;
    this.url = null;
    this.machine.closed();
    this.tellStatus();
  }

  // Behind an edge what this leaf says is signed: the root takes nobody's word for it. Nothing overtakes it meanwhile.
  say(kind, message, generation) {
    if (!this.signs) {
      this.transmit(encodeFrame(generation, kind, message));
      return;
    }
    const { socket } = this;
    this.saying = this.saying.then(async () => {
      const said = message.batch?.ops ? batchStatement(message.batch) : statement(kind, message);
      const signature = said === null ? null : await sign(this.signing, said);
      if (this.socket === socket) this.transmit(encodeFrame(generation, kind, signature ? { ...message, signature } : message));
    });
  }

  onUndelivered(fn) {
    this.onUndeliveredFn = fn;
  }

  transmit(frame) {
    if (this.socket?.readyState === 1) this.socket.send(frame);
  }

  onBeat() {
    const now = Date.now();
    const { machine } = this;
    if (machine.linked || machine.cache.opening !== null) {
      if (!machine.isAsking) {
        this.askWait = ASK_MS;
        this.askAt = now + ASK_MS;
      } else if (now >= this.askAt && now >= machine.slowUntil) {
        this.askWait = Math.min(2 * this.askWait, ASK_MS_MAX);
        this.askAt = now + this.askWait;
        machine.askAgain();
      }
      if (machine.offers.size && now - (this.announcedAt ?? 0) >= 10000) {
        this.announcedAt = now;
        machine.announce();
      }
      if (machine.touches.read.size) machine.sayWhatIsRead();
    }
    if (this.dirty) this.save().catch((error) => (this.lastError = error));
  }

  save() {
    this.dirty = false;
    const state = { ...this.machine.state(), feed: this.feed, signing: this.signing };
    this.saving = this.saving.catch(() => undefined).then(() => this.storage.save(state));
    return this.saving;
  }

  changed(keys) {
    this.dirty = true;
    if (keys === null) this.answers.clear();
    else for (const key of keys) this.answers.delete(key);
    for (const [key, answer] of this.answers) if (!answer.live) this.answers.delete(key);
    this.settle();
    for (const watch of [...this.watches]) watch.news(keys);
    this.tellStatus();
  }

  tellStatus() {
    for (const fn of this.listeners) fn(this.status());
  }

  checkOpen() {
    if (this.refused) throw this.refused;
    if (this.ended) throw new EchoError("E-CLOSED", "this connection is closed");
  }

  settle() {
    for (const [name, { spec, at, waiting }] of this.reads) {
      const version = this.machine.cache.read(keyOf(spec), at);
      if (version !== null) {
        this.reads.delete(name);
        for (const { resolve } of waiting) resolve(version);
      } else if (!this.machine.isWanted(spec, at)) this.machine.want(spec, at);
    }
    for (const each of [...this.conditions]) {
      if (each.condition()) {
        this.conditions.splice(this.conditions.indexOf(each), 1);
        each.resolve();
      }
    }
  }

  lost(spec, at, oldest, reason) {
    const error = reason === null
      ? Object.assign(new EchoError("E-GONE", `the state at tick ${at} is forgotten`), { oldest })
      : new EchoError("E-REFUSED", `this index is refused: ${reason}`, "Ask for less, or for another capability.");
    const name = `${keyOf(spec)}@${at ?? ""}`;
    for (const { reject } of this.reads.get(name)?.waiting ?? []) reject(error);
    this.reads.delete(name);
    if (reason !== null) for (const watch of [...this.watches]) if (watch.key === keyOf(spec)) watch.denied(error);
  }

  fail(error) {
    for (const { waiting } of this.reads.values()) for (const { reject } of waiting) reject(error);
    this.reads.clear();
    for (const { reject } of this.conditions.splice(0)) reject(error);
    this.lastError = error;
    this.answers.clear();
    this.tellStatus();
  }

  read(spec, at = null) {
    return new Promise((resolve, reject) => {
      this.checkOpen();
      const version = this.machine.cache.read(keyOf(spec), at);
      if (version !== null) return resolve(version);
      this.counts.questions++;
      const name = `${keyOf(spec)}@${at ?? ""}`;
      const read = this.reads.get(name) ?? this.reads.set(name, { spec, at, waiting: [] }).get(name);
      const each = this.patient(resolve, reject, () => {
        read.waiting.splice(read.waiting.indexOf(each), 1);
        if (!read.waiting.length) this.reads.delete(name);
      });
      read.waiting.push(each);
      this.machine.want(spec, at);
    });
  }

  until(condition, what) {
    return new Promise((resolve, reject) => {
      this.checkOpen();
      if (condition()) return resolve();
      const each = { condition, ...this.patient(resolve, reject, () => this.conditions.splice(this.conditions.indexOf(each), 1), what) };
      this.conditions.push(each);
    });
  }

  patient(resolve, reject, giveUp, what = "no answer came") {
    const timer = setTimeout(() => {
      giveUp();
      const because = this.lastError ? ` (${this.lastError.what})` : "";
      reject(this.connected ? new EchoError("E-TIMEOUT", `${what} in time`) : new EchoError("E-UNREACHABLE", `this is not held here, and there is no connection${because}`));
    }, this.timeoutMs);
    const done = (then) => (value) => {
      clearTimeout(timer);
      then(value);
    };
    return { resolve: done(resolve), reject: done(reject) };
  }

  // The answer if it is held; null otherwise.
  held(asked) {
    const spec = indexSpec(this.key, asked);
    const key = keyOf(spec);
    const found = this.answers.get(key);
    if (found) return found;
    const version = this.machine.cache.read(key);
    if (version === null) return null;
    if (this.machine.touches.note(key, spec)) this.machine.sayWhatIsRead();
    this.machine.want(spec); // no question if its changes are told
    if (asked.sealed && this.unsealed.get(key) !== version.value) {
      this.checkedSeal(spec, version.value).then(() => this.changed(new Set([key])), (error) => (this.lastError = error));
      return null;
    }
    const answer = this.made(asked, key, version, this.machine.outbox.overlay(), this.tick);
    answer.live = version.live;
    this.answers.set(key, answer);
    return answer;
  }

  // Whether a value is what the root sealed, found out once for each; one that is not is dropped, and so is the connection.
  async checkedSeal(spec, value) {
    const key = keyOf(spec);
    if (this.unsealed.get(key) === value) return;
    try {
      await checkSeal(spec, value, this.sealers);
    } catch (error) {
      this.machine.cache.holdings.versions.delete(key);
      this.answers.delete(key);
      if (error.code === "E-CORRUPT") this.socket?.close(1000);
      throw error;
    }
    if (this.unsealed.size >= ENTRIES_MAX) this.unsealed.clear();
    this.unsealed.set(key, value);
  }

  async answer(asked) {
    for (;;) {
      this.checkOpen();
      const spec = indexSpec(this.key, asked);
      const version = asked.sealed ? this.machine.cache.read(keyOf(spec)) : null;
      if (version !== null) await this.checkedSeal(spec, version.value);
      const found = this.held(asked);
      if (found !== null) return found;
      await this.read(spec);
    }
  }

  async answerAt(asked, tick, operations) {
    const spec = indexSpec(this.key, asked);
    const version = await this.read(spec, tick);
    if (asked.sealed) await this.checkedSeal(spec, version.value);
    return this.made(asked, keyOf(spec), version, operations, tick);
  }

  made(asked, key, version, operations, tick) {
    let decoded = this.decoded.get(key);
    if (decoded?.value !== version.value) {
      try {
        decoded = { value: version.value, items: readItems(version.value) };
      } catch (error) {
        this.machine.cache.holdings.versions.delete(key);
        this.socket?.close(1000);
        throw error;
      }
      if (this.decoded.size >= ENTRIES_MAX) this.decoded.clear();
      this.decoded.set(key, decoded);
      if (this.known.size > ITEMS_MAX) this.known.clear();
      for (const each of decoded.items) this.known.set(each.item, each);
    }
    const { items, pending } = view(asked, decoded.items, operations, this.feed ?? NOTHING, (item) => this.known.get(item));
    return Object.assign(items.map((each) => new Item(this, each)), { tick, pending });
  }
}

// A query: every call returns another one.
export class Query {
  constructor(party, asked) {
    this.party = party;
    this.asked = asked;
    this.spec = indexSpec(party.key, asked);
  }
  with(parts) {
    return new Query(this.party, { ...this.asked, ...parts });
  }
  where(conditions) {
    return this.with({ filter: { all: [this.asked.filter, ...comparisons(conditions)] } });
  }
  // Items that pass at least one of several conditions.
  whereAny(...several) {
    return this.with({ filter: { all: [this.asked.filter, { any: several.map((each) => ({ all: comparisons(each) })) }] } });
  }
  deleted(rule) {
    if (!DELETED_RULES.includes(rule)) throw new EchoError("E-USAGE", `deleted is one of ${DELETED_RULES.join(", ")}`);
    return this.with({ deleted: rule });
  }
  orderBy(...names) {
    const order = names.map((name) => (name.startsWith("-") ? { field: parseField(name.slice(1)), descending: true } : { field: parseField(name), descending: false }));
    return this.with({ order });
  }
  // With the root's signature, which is checked: an edge can't forge what is shown.
  sealed() {
    return this.with({ sealed: true });
  }
  limit(limit) {
    if (!Number.isInteger(limit) || limit < 1 || limit > ITEMS_MAX) throw new EchoError("E-USAGE", `a limit is a whole number from 1 to ${ITEMS_MAX}`);
    return this.with({ limit });
  }
  all() {
    return this.party.answer(this.asked);
  }
  held() {
    return this.party.held(this.asked);
  }
  // Calls `fn(answer)` now and whenever the answer is another one; the function that ends this.
  watch(fn, onError = (error) => Promise.reject(error)) {
    const watch = new Watch(this, fn, onError);
    return () => watch.close();
  }
}

class Watch {
  constructor(query, fn, onError) {
    Object.assign(this, { query, fn, onError, key: keyOf(query.spec), last: null, scheduled: false, ended: false });
    query.party.watches.add(this);
    this.hold();
    this.news(null);
  }
  hold() {
    const { machine } = this.query.party;
    if (!this.ended) machine.want(this.query.spec);
  }
  news(keys) {
    this.hold();
    if (this.scheduled || this.ended || (keys !== null && !keys.has(this.key) && this.last !== null)) return;
    this.scheduled = true;
    queueMicrotask(() => this.tell()); // changes of one moment are told once
  }
  tell() {
    this.scheduled = false;
    if (this.ended || this.query.party.ended) return;
    try {
      const answer = this.query.held();
      if (answer === null || (this.last !== null && sameAnswer(this.last, answer))) return;
      // The states as they are now: handles take up own edits in place, and would look as if nothing had changed.
      this.last = Object.assign(answer.map(({ state }) => ({ state })), { pending: answer.pending });
      this.fn(answer);
    } catch (error) {
      this.onError(error);
    }
  }
  denied(error) {
    this.close();
    this.onError(error);
  }
  close() {
    this.ended = true;
    this.query.party.watches.delete(this);
  }
}

function sameAnswer(one, other) {
  return one.pending === other.pending && one.length === other.length && one.every((each, at) => {
    const state = each.state, next = other[at].state;
    return state === next || (state.item === next.item && state.deleted === next.deleted && state.parent === next.parent && sameValue(state.values, next.values));
  });
}

// A value as a reader gets it: changing an array or map of it throws, because that would change no item.
function frozen(value) {
  if (value === null || typeof value !== "object" || Object.isFrozen(value)) return value;
  if (!Array.isArray(value) && Object.getPrototypeOf(value) !== Object.prototype) return value;
  for (const each of Object.values(value)) frozen(each);
  return Object.freeze(value);
}

// A handle of an item: the state it was read with, and own edits of it.
export class Item {
  constructor(party, state) {
    this.party = party;
    this.state = state;
    Object.preventExtensions(this); // task.title = "x" throws; task.set("title", "x") writes
  }
  get id() {
    return this.state.item;
  }
  get type() {
    return this.state.type;
  }
  get model() {
    return this.state.model;
  }
  get parent() {
    return this.state.parent || null;
  }
  get deleted() {
    return this.state.deleted;
  }
  get source() {
    return this.state.source || null;
  }
  get target() {
    return this.state.target || null;
  }
  get values() {
    return frozen(this.state.values);
  }
  // The content of a text, list or log; the properties of others.
  get value() {
    return this.model === "property-set" ? this.values : this.values.value;
  }
  get(path) {
    return frozen(readField({ steps: Array.isArray(path) ? path : [path], attribute: false }, this.state));
  }
  set(path, value) {
    this.change([[path, value === undefined ? null : value]]);
  }
  unset(path) {
    this.change([[path, undefined]]);
  }
  update(properties) {
    this.change(Object.entries(properties));
  }
  change(changes) {
    this.mustBe("property-set");
    this.write("propertySet", propertyChanges(changes));
  }
  delete() {
    this.write("metadata", propertyChanges([["deleted", true], ["deleted_at_ms", Date.now()]]));
  }
  restore() {
    this.write("metadata", propertyChanges([["deleted", undefined], ["deleted_at_ms", undefined]]));
  }
  move(parent) {
    this.write("placement", { kind: 0, parent: parent === null ? NOTHING : unhex(itemId(parent)) });
  }
  link(target, type = "link", properties = {}) {
    return this.party.link(this, target, type, properties);
  }
  // Text: take `length` characters out at a position and put others in; positions count code points.
  splice(position, length, inserted) {
    if (this.model === "growable-array") return this.spliceList(position, length, inserted);
    this.mustBe("text");
    const seen = [...this.value];
    if (position < 0) position += seen.length; // from the end, as for arrays
    if (position < 0 || length < 0 || position + length > seen.length) throw new EchoError("E-USAGE", `the text has ${seen.length} characters`);
    const edit = { position, removed: seen.slice(position, position + length).join(""), inserted, before: seen.slice(Math.max(0, position - 32), position).join("") };
    this.edit(encode("LeafOperation", { text: edit }));
  }
  spliceList(position, length, inserted) {
    const seen = this.value;
    if (position < 0) position += seen.length; // from the end, as for arrays
    if (position < 0 || length < 0 || position + length > seen.length) throw new EchoError("E-USAGE", `the list has ${seen.length} elements`);
    const list = { position, removed: seen.slice(position, position + length).map((each) => toValue(each)), inserted: inserted.map((each) => toValue(each)) };
    this.edit(encode("LeafOperation", { list }));
  }
  insert(position, what) {
    this.splice(position, 0, this.model === "text" ? what : [what]);
  }
  append(...what) {
    if (this.model === "threaded-log") return what.forEach((each) => this.post(each));
    if (this.model === "text") this.splice([...this.value].length, 0, what.join(""));
    else {
      this.mustBe("growable-array");
      this.splice(this.value.length, 0, what);
    }
  }
  post(body, replyTo = null) {
    this.mustBe("threaded-log");
    const post = { body: toValue(body) };
    if (replyTo !== null) {
      const [feed, seq, position] = replyTo.split("/");
      post.replyTo = { feed: feed === hex(this.party.feed) ? NOTHING : unhex(feed), seq: Number(seq), position: Number(position) };
    }
    this.write("log", { post });
  }
  mustBe(model) {
    if (this.model !== model) throw new EchoError("E-USAGE", `this is a ${this.model}, not a ${model}`);
  }
  write(kind, body) {
    this.edit(operationDelta(this.party.feed, this.id, kind, body));
  }
  edit(delta) {
    this.party.publish([{ object: unhex(this.id), delta }]);
    this.state = applyDelta(this.state, this.id, delta, this.party.feed) ?? this.state;
  }
}

// ---------------------------------------------------------------- small things

function systemText(system) {
  return `${hex(system.root)}/${system.path.join(".")}`;
}

function parseSystem(text) {
  const [root, path = ""] = String(text).split("/");
  const found = { root: unhex(root), path: path.split(".").filter((each) => each).map(Number) };
  if (found.root.length !== 16 || found.path.some((each) => !Number.isSafeInteger(each))) throw new EchoError("E-USAGE", "this does not name a system");
  return found;
}

function readContext(text) {
  return JSON.parse(text).map((clause) => clause.map(([system, gen, tick]) => ({ clock: { system: parseSystem(system), gen }, tick })));
}

function randomNonce() {
  return crypto.getRandomValues(new BigUint64Array(1))[0] >> 1n;
}

async function newKey() {
  if (!globalThis.crypto?.subtle) throw new EchoError("E-REFUSED", "this page may not make keys", "Serve it from https, or from localhost.");
  const pair = await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
  return { private: pair.privateKey, public: new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)) };
}

async function sign(key, message) {
  return new Uint8Array(await crypto.subtle.sign("Ed25519", key.private, message));
}
