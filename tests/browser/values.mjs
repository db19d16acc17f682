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
