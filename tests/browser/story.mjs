// The leaf in Node against a real socket: `node --experimental-websocket story.mjs MODULE URL CAPABILITY`.
// It speaks lines of JSON with the test that runs it: what it did, and waits for a line before it goes on.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = async (what) => {
  console.log(JSON.stringify(what));
  return JSON.parse((await lines.next()).value);
};

const storage = new leaf.MemoryStorage();
const party = await leaf.connect(process.argv[3], process.argv[4], { storage });
const titles = (items) => items.map((each) => each.get("title"));
const tasks = party.query({ type: "task" }).orderBy("title");
await say(["read", titles(await tasks.all())]);

const seen = [];
const watch = tasks.watch((answer) => seen.push(titles(answer)));
const task = party.create({ type: "task" }, { title: "js", done: false });
const ahead = titles(await tasks.all());
task.set("done", true);
const text = party.create({ model: "text", type: "note" });
text.append("hello");
text.insert(0, "😀 ");
text.splice(2, 1, "J");
const list = party.create({ model: "growable-array", type: "list" });
list.append(1, 2, 3);
list.splice(0, 1, ["one"]);
const log = party.create({ model: "threaded-log", type: "chat" });
log.post({ text: "hi" });
party.batch(() => {
  const link = task.link(text, "about", { weight: 2 });
  link.set("weight", 3);
});
await party.fence("full");
await say(["written", ahead, party.pending, [text.value, list.value, log.value.length], party.system]);

await say(["one state", await party.transaction(async (tx) => [titles(await tx.all(tasks)), (await tx.get(text.id)).value])]);

let state = await say(["offline?"]);
party.goOffline();
const offline = party.create({ type: "task" }, { title: "offline" });
offline.set("done", true);
offline.delete();
offline.restore();
await say(["offline", titles(await tasks.all()), party.connected]);
party.goOnline();
await party.fence("full");
await say(["back", titles(await tasks.all()), party.pending]);

const got = [];
party.onMessage((each) => got.push(new TextDecoder().decode(each.payload)));
party.send(party.system, "self", new TextEncoder().encode("to myself"));
await party.until(() => got.length > 0, "no message");
party.announce("printer", new Uint8Array([1, 2]));
await party.fence("full");
await say(["services", (await party.services("print")).map((each) => [each.name, leaf.hex(each.detail)]), got]);

watch();
await party.close();
const again = await leaf.connect(process.argv[3], process.argv[4], { storage });
await say(["again", titles(await again.query({ type: "task" }).orderBy("title").all()), again.system, seen]);
let refused = null;
again.onRejected((each) => (refused = each.reason));
again.create({ type: "forbidden" });
await again.fence("full");
await say(["refused", refused, again.rejections.length]);
try {
  await again.query({ type: "task" }).where({ nonsense__much: 3 });
} catch (error) {
  await say(["wrong", error.code]);
}
await again.close();
process.exit(0);
