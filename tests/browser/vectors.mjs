// Compares the module with vectors that the Python codecs wrote: `node vectors.mjs MODULE VECTORS`.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const vectors = JSON.parse(readFileSync(process.argv[3], "utf-8"));
const { hex, unhex } = leaf;
let checked = 0;

function check(what, found, wanted) {
  checked++;
  if (JSON.stringify(found) !== JSON.stringify(wanted)) {
    console.log(`FAILED ${what}\n  found  ${JSON.stringify(found)}\n  wanted ${JSON.stringify(wanted)}`);
    process.exitCode = 1;
  }
}

function refuses(what, work) {
  checked++;
  try {
    work();
  } catch (error) {
    if (error instanceof leaf.EchoError) return;
    throw error;
  }
  console.log(`FAILED ${what}: it was taken`);
  process.exitCode = 1;
}

for (const { kind, bytes } of vectors.frames) {
  const frame = leaf.decodeFrame(unhex(bytes));
  check(`kind of ${kind}`, frame.kind, kind);
  check(`frame ${kind}`, hex(leaf.encodeFrame(frame.generation, frame.kind, frame.message)), bytes);
}
for (const bytes of vectors.bent) {
  checked++;
  try {
    leaf.decodeFrame(unhex(bytes));
  } catch (error) {
    if (!(error instanceof leaf.EchoError)) throw error;
  }
}
for (const bytes of vectors.malformed) refuses(`bytes ${bytes}`, () => leaf.decodeFrame(unhex(bytes)));
for (const bytes of vectors.unbelievable) {
  const machine = new leaf.LeafMachine({ send() {}, changed() {}, told() {}, delivered() {}, lost() {} });
  const clock = leaf.decodeFrame(unhex(bytes)).message.clock;
  machine.opening(7n, 1n);
  machine.receive({ generation: 7n, kind: "linked", message: { clock, tick: 1, follows: [], rejected: [] } });
  check("linked", [machine.linked, machine.cache.cur], [true, 1]);
  refuses(`update ${bytes.slice(0, 80)}`, () => machine.receive(leaf.decodeFrame(unhex(bytes))));
  check("the tick after an update that was refused", machine.cache.cur, 1);
}
for (const { bytes } of vectors.values) {
  check(`value ${bytes}`, hex(leaf.encode("Value", leaf.toValue(leaf.fromValue(leaf.decode("Value", unhex(bytes)))))), bytes);
}
for (const { party, asked, spec } of vectors.specs) {
  const query = asked.item === undefined ? build(party, asked) : { asked };
  check(`spec ${JSON.stringify(asked)}`, hex(leaf.indexSpec(unhex(party), query.asked)), spec);
}
const touches = new leaf.Touches();
const holdings = new leaf.Holdings();
holdings.cur = 1;
for (const [place, { spec, kind, size, found }] of vectors.touches.entries()) {
  const bytes = unhex(spec);
  const key = leaf.keyOf(bytes);
  if (place === 0) {
    for (const each of new Set(vectors.touches.map((step) => step.spec))) {
      if (each !== vectors.unheld) holdings.learn(leaf.keyOf(unhex(each)), { min: 1, max: 1, value: new Uint8Array(100), live: true });
    }
  }
  if (kind === "note") check(`touches ${place}: note`, touches.note(key, bytes), found);
  else if (kind === "take") check(`touches ${place}: take`, touches.take().map(hex).sort(), found);
  else if (kind === "delta") touches.received([{ delta: { spec: bytes, gm: 0, patch: new Uint8Array(size) } }], holdings);
  else if (kind === "invalidate") touches.received([{ invalidate: bytes }], holdings);
  else if (kind === "told") touches.told(key);
  else touches.clear();
}
for (const { old, patch, result } of vectors.patches) {
  const found = leaf.patched(unhex(old), unhex(patch));
  check("patch", found === null ? null : hex(found), result);
}
for (const { feed, item, kind, body, delta } of vectors.operations) {
  const made = kind === "propertySet" || kind === "metadata" ? leaf.propertyChanges(body.map(([path, value]) => [path, value === null ? undefined : leaf.fromValue(leaf.decode("Value", unhex(value)))])) : bytesIn(body);
  check(`operation ${kind}`, hex(leaf.operationDelta(unhex(feed), item, kind, made)), delta);
}
for (const { text, edit, place } of vectors.places) check(`place of ${JSON.stringify(edit)}`, leaf.nearest([...text], edit), place);
for (const { party, feed, asked, value, operations, shown, pending } of vectors.views) {
  const query = asked.item === undefined ? build(party, asked) : { asked };
  const ops = operations.map(([object, delta]) => ({ object: unhex(object), delta: unhex(delta) }));
  const found = leaf.view(query.asked, leaf.readItems(unhex(value)), ops, unhex(feed));
  const states = found.items.map((each) => [each.item, hex(leaf.encode("Value", leaf.toValue(each.values))), each.deleted]);
  check(`view of ${JSON.stringify(asked)}`, [states, found.pending], [shown, pending]);
}
replay(vectors.story);
rules();
console.log(`${checked} checks`);

function build(party, asked) {
  let query = new leaf.Query({ key: unhex(party) }, { filter: { all: [] }, order: [], limit: 0, deleted: "hide" });
  for (const each of asked.where ?? []) query = query.where(constants(each));
  if (asked.any) query = query.whereAny(...asked.any.map(constants));
  if (asked.deleted) query = query.deleted(asked.deleted);
  if (asked.order) query = query.orderBy(...asked.order);
  return asked.limit ? query.limit(asked.limit) : query;
}

function constants(conditions) {
  const read = (each) => leaf.fromValue(leaf.decode("Value", unhex(each)));
  return Object.fromEntries(Object.entries(conditions).map(([key, value]) => [key, Array.isArray(value) ? value.map(read) : typeof value === "boolean" ? value : read(value)]));
}

function bytesIn(body) {
  return Object.fromEntries(Object.entries(body).map(([key, value]) => [key, value?.hex !== undefined ? unhex(value.hex) : value !== null && typeof value === "object" && !Array.isArray(value) ? bytesIn(value) : value]));
}

// The same frames in, the same held values, ticks, batches and questions as the machine in Python.
function replay(story) {
  const sent = [];
  const machine = new leaf.LeafMachine({
    send: (kind, message, generation) => sent.push(hex(leaf.encodeFrame(generation, kind, message))),
    changed: () => undefined, told: () => undefined, delivered: () => undefined, lost: () => undefined,
  });
  const key = (spec) => String.fromCharCode(...unhex(spec));
  for (const [number, step] of story.entries()) {
    if (step.opening) machine.opening(BigInt(step.opening[0]), BigInt(step.opening[1]));
    else if (step.closed) machine.closed();
    else if (step.want) machine.want(unhex(step.want[0]), step.want[1]);
    else if (step.publish) {
      const batch = machine.publish(step.publish.map(([object, delta]) => ({ object: unhex(object), delta: unhex(delta) })));
      machine.sendBatch(batch);
    } else if (step.frame) machine.receive(leaf.decodeFrame(unhex(step.frame)));
    check(`step ${number} (${Object.keys(step)[0]}): sent`, sent.splice(0), step.sent);
    check(`step ${number}: tick`, machine.cache.cur, step.tick);
    check(`step ${number}: batches`, machine.outbox.batches.length, step.batches);
    for (const [spec, value] of step.held) {
      const version = machine.cache.read(key(spec));
      check(`step ${number}: held`, version === null ? null : hex(version.value), value);
    }
  }
}

// What an honest, ordered link never says, and what has to come of it all the same.
function rules() {
  const clock = { system: { root: new Uint8Array(16), path: [] }, gen: 0 };
  const spec = new Uint8Array([1]), key = "\u0001";
  const value = (byte) => new Uint8Array([byte]);
  const fresh = () => {
    const cache = new leaf.Cache();
    cache.opening = 1n;
    cache.open(1n, { clock, tick: 5, follows: [] });
    return cache;
  };
  const update = (prev, tick, items = [], other = clock) => ({ clock: other, prev, tick, follows: [], items });
  let cache = fresh();
  check("D1: a gap", cache.apply(update(6, 7)), null);
  check("D1: backwards", cache.apply(update(5, 5)), null);
  check("D1: another clock", cache.apply(update(5, 6, [], { ...clock, gen: 1 })), null);
  check("D1: next", [cache.apply(update(5, 6)), cache.cur], [[], 6]);
  cache = fresh();
  cache.holdings.floor = 3;
  cache.holdings.learn(key, { min: 5, max: 5, value: value(1), live: true });
  cache.holdings.learn(key, { min: 3, max: 4, value: value(2), live: false });
  cache.apply(update(5, 6, [{ subscribed: { spec, gm: 4 } }]));
  check("D3: what else is held is live no more", cache.holdings.versions.get(key).map((each) => [each.value[0], each.live]), [[1, false], [2, true]]);
  cache = fresh();
  check("D6: nobody asked", [cache.grant({ spec, min: 5, max: 5, value: value(1) }), cache.read(key)], [false, null]);
  cache.want(spec);
  check("D5: a Subscribed that came first", cache.apply(update(5, 6, [{ subscribed: { spec, gm: 5 } }])), [key]);
  check("D5: joins the Grant", [cache.grant({ spec, min: 5, max: 5, value: value(1) }), cache.read(key).live], [true, true]);
  check("D4: goes on by itself", [cache.apply(update(6, 9)), cache.read(key).max], [[], 9]);
  cache.apply(update(9, 10, [{ invalidate: spec }]));
  check("D2: good for the past alone", [cache.read(key), cache.read(key, 9)?.value[0] ?? null], [null, 1]);
  cache.want(spec);
  cache.close();
  check("D8: asked again, with the hash of what is held", cache.askAgain().map((each) => hex(each.have)), [hex(leaf.sha256(value(1)))]);
}
