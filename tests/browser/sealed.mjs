// Sealed answers in Node against a real peer: `node --experimental-websocket sealed.mjs MODULE URL CAPABILITY`.
// One line of JSON at the end; what goes wrong ends it with an error.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const [url, capability] = process.argv.slice(3);
const code = async (work) => {
  try {
    await work();
  } catch (error) {
    return error.code;
  }
  return null;
};

const party = await leaf.connect(url, capability);
const tasks = party.query({ type: "task" }).orderBy("title").sealed();
const titles = (items) => items.map((each) => each.get("title"));
assert.deepEqual(titles(await tasks.all()), ["truth", "water"]);
assert.equal((await party.get((await tasks.all())[0].id, { sealed: true })).get("title"), "truth");
assert.deepEqual(titles(await party.transaction((tx) => tx.all(tasks))), ["truth", "water"]);

// a change comes as a patch, and is checked before it is shown
const seen = [];
const end = tasks.watch((answer) => seen.push(titles(answer)));
(await tasks.all())[1].set("title", "wine");
await party.fence("full");
for (let round = 0; round < 3000 && seen.at(-1)?.join() !== "truth,wine"; round++) await new Promise((later) => setTimeout(later, 10));
assert.deepEqual(seen.at(-1), ["truth", "wine"]);
end();

const value = party.machine.cache.read(leaf.keyOf(tasks.spec)).value;
const sealers = party.sealers;
await leaf.checkSeal(tasks.spec, value, sealers);
const bent = leaf.decode("IndexValue", value);
const again = (changes) => leaf.encode("IndexValue", { ...bent, ...changes });
const other = await crypto.subtle.generateKey("Ed25519", true, ["sign", "verify"]);
const stranger = new Uint8Array(await crypto.subtle.exportKey("raw", other.publicKey));
const [one, two] = bent.items;
const wrong = {
  "other key": [tasks.spec, value, [stranger]],
  "no key": [tasks.spec, value, []],
  "other spec": [party.query({ type: "note" }).sealed().spec, value, sealers],
  "no seal": [tasks.spec, again({ seal: new Uint8Array() }), sealers],
  "empty seal": [tasks.spec, again({ seal: new Uint8Array(64) }), sealers],
  "an item left out": [tasks.spec, again({ items: [one] }), sealers],
  "another order": [tasks.spec, again({ items: [two, one] }), sealers],
  "another state": [tasks.spec, again({ items: [{ ...one, state: two.state }, two] }), sealers],
  "another type": [tasks.spec, again({ items: [{ ...one, type: "note" }, two] }), sealers],
  "shown as deleted": [tasks.spec, again({ items: [{ ...one, deleted: true }, two] }), sealers],
  "another record": [tasks.spec, again({ items: [{ ...one, record: two.record }, two] }), sealers],
  "another record with its hash": [tasks.spec, again({ items: [{ ...one, record: two.record, hash: two.hash }, two] }), sealers],
};
for (const [name, arguments_] of Object.entries(wrong)) assert.equal(await code(() => leaf.checkSeal(...arguments_)), "E-CORRUPT", name);
await party.close();

// somebody on the way changes one word of what is shown, and leaves the record as it is
let forging = true;
class Forging extends WebSocket {
  set onmessage(fn) {
    super.onmessage = (event) => {
      if (!forging || typeof event.data === "string") return fn(event);
      const data = Buffer.from(new Uint8Array(event.data));
      const at = data.indexOf("truth");
      if (at >= 0) data.write("forge", at);
      return fn({ data: data.buffer.slice(data.byteOffset, data.byteOffset + data.length) });
    };
  }
}
const lied = await leaf.connect(url, capability, { webSocket: Forging });
assert.equal(await code(() => lied.query({ type: "task" }).sealed().all()), "E-CORRUPT");
assert.equal(lied.query({ type: "task" }).sealed().held(), null);
forging = false;
for (let round = 0; round < 3000 && !(lied.connected && lied.counts.links > 1); round++) await new Promise((later) => setTimeout(later, 10));
assert.equal(lied.counts.links, 2, "a value that is forged ends the link");
assert.deepEqual(titles(await lied.query({ type: "task" }).orderBy("title").sealed().all()), ["truth", "wine"]);
await lied.close();

// a browser without Ed25519 says so, and shows nothing
const { importKey } = crypto.subtle;
crypto.subtle.importKey = () => Promise.reject(Object.assign(new Error("no"), { name: "NotSupportedError" }));
assert.equal(await code(() => leaf.checkSeal(tasks.spec, value, sealers)), "E-REFUSED");
crypto.subtle.importKey = importKey;
console.log(JSON.stringify(["ok", Object.keys(wrong).length]));
process.exit(0);
