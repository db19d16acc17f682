// Writes through an edge in Node: `node --experimental-websocket signed.mjs MODULE URL CAPABILITY`.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const party = await leaf.connect(process.argv[3], process.argv[4]);
assert.equal(party.signs, true);
party.create({ type: "task" }, { title: "browser" });
party.create({ type: "task" }, { title: "browser again" });
await party.fence("release");
const batch = {
  arc: { system: { root: new Uint8Array(16).fill(114), path: [1] }, gen: 1 }, number: 3,
  ops: [{ n: 5, object: new TextEncoder().encode("item"), delta: new TextEncoder().encode("delta") }],
};
console.log(Buffer.from(leaf.batchStatement(batch)).toString("hex"));
await party.close();
