// Writes through an edge in Node: `node --experimental-websocket signed.mjs MODULE URL CAPABILITY`. Prints what it signs, as JSON.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const party = await leaf.connect(process.argv[3], process.argv[4]);
assert.equal(party.signs, true);
const heard = new Promise((resolve) => party.onMessage(resolve));
party.create({ type: "task" }, { title: "browser" });
party.create({ type: "task" }, { title: "browser again" });
await party.fence("release");
party.announce("echo");
await party.send(party.system, "note", new TextEncoder().encode("to myself"));
await heard;

const bytes = (text) => new TextEncoder().encode(text);
const root = new Uint8Array(16).fill(114);
const own = { root, path: [1] };
const other = { root, path: [2, 300] };
const arc = { system: own, gen: 1 };
const id = { sender: own, stream: 2 ** 32, seq: 7 };
const context = [{ witnesses: [{ clock: { system: { root, path: [] }, gen: 0 }, tick: 300 }, { clock: arc, tick: 2 }] }];
const service = { system: own, name: "sch\u00e4ch", gen: 1 };
const said = {
  batch: leaf.batchStatement({ arc, number: 3, ops: [{ n: 5, object: bytes("item"), delta: bytes("delta") }] }),
  release: leaf.statement("releaseArc", { arc, batch: 300 }),
  announce: leaf.statement("announce", { ...service, seq: 2, detail: bytes("white") }),
  deannounce: leaf.statement("deannounce", { ...service, seq: 3, detail: bytes("") }),
  message: leaf.statement("userMessage", {
    id, floor: 5, after: 6, target: other, context, type: "note", payload: bytes("hello"), crossRoot: true,
  }),
  receipt: leaf.statement("userReceipt", { id, target: other }),
};
console.log(JSON.stringify(Object.fromEntries(Object.entries(said).map(([name, data]) => [name, Buffer.from(data).toString("hex")]))));
await party.close();
