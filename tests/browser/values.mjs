// One check of how the leaf takes and gives values: `node --experimental-websocket values.mjs MODULE URL CAPABILITY CHECK`.
// Prints one line of JSON.
import { pathToFileURL } from "node:url";

const leaf = await import(pathToFileURL(process.argv[2]));
const party = await leaf.connect(process.argv[3], process.argv[4], { storage: new leaf.MemoryStorage() });

const thrown = async (work) => {
  try {
    await work();
    return null;
  } catch (error) {
    return error.message;
  }
};

const CHECKS = {
  async positions() {
    const text = party.create({ model: "text", type: "note" });
    const list = party.create({ model: "growable-array", type: "list" });
    text.append("helo");
    text.insert(-1, "l");
    list.append(1, 3);
    list.insert(-1, 2);
    const far = [await thrown(() => text.insert(-9, "x")), await thrown(() => list.insert(-9, 0))];
    return [text.value, list.value, far];
  },
  async frozen() {
    const item = party.create({ type: "thing" }, { tags: ["a"], m: { z: [1] }, n: 1 });
    const list = party.create({ model: "growable-array", type: "list" });
    list.append({ a: [1] });
    await party.fence("full");
    const [read] = await party.query({ type: "thing" }).all();
    const tried = [
      () => item.get("tags").push("b"),
      () => (item.get("m").z = 2),
      () => item.get(["m", "z"]).push(2),
      () => (item.values.n = 2),
      () => (item.value.n = 2),
      () => (item.title = "x"),
      () => list.value.push(1),
      () => list.value[0].a.push(1),
      () => read.get("tags").push("b"),
    ];
    const messages = [];
    for (const each of tried) messages.push(await thrown(each));
    item.set("tags", [...item.get("tags"), "b"]);
    return [messages, item.value, list.value];
  },
  async names() {
    const names = ["name", "version", "model", "type", "parent", "self", "properties", "source", "target", "key"];
    const properties = Object.fromEntries(names.map((each) => [each, `the ${each}`]));
    const item = party.create({ type: "thing" }, properties);
    item.update({ type: "other" });
    const link = party.link(item, item, "near", properties);
    await party.fence("full");
    return [item.type, item.value, link.value, await thrown(() => party.create({ type: "task", title: "lost" }))];
  },
};

console.log(JSON.stringify(await CHECKS[process.argv[5]]()));
await party.close();
process.exit(0);
