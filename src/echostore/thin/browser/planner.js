import { connect } from "./echostore-leaf.js";

const $ = (id) => document.getElementById(id);
const trouble = (error) => ($("trouble").textContent = error?.message ?? error);

function row(task) {
  const line = document.createElement("li");
  line.dataset.id = task.id;
  line.className = task.get("done") ? "done" : "";
  const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: task.get("done") === true });
  box.setAttribute("aria-label", "done");
  box.onchange = () => task.set("done", box.checked);
  const title = Object.assign(document.createElement("input"), { type: "text", value: task.get("title") ?? "" });
  title.setAttribute("aria-label", "title");
  title.onchange = () => task.set("title", title.value);
  const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "✕", title: "Delete" });
  remove.onclick = () => task.delete();
  line.append(box, title, remove);
  return line;
}

function show(answer) {
  // What is being typed stays: a line whose text has the focus is left as it is.
  const typing = document.activeElement?.closest?.("li")?.dataset.id;
  for (const [list, done] of [["open", false], ["done", true]]) {
    const tasks = answer.filter((each) => (each.get("done") === true) === done);
    const kept = new Map([...$(list).children].map((each) => [each.dataset.id, each]));
    $(list).replaceChildren(...tasks.map((each) => (each.id === typing && kept.get(each.id)) || row(each)));
    if (!tasks.length) $(list).append(Object.assign(document.createElement("li"), { className: "empty", textContent: done ? "Nothing yet." : "All done." }));
    $(`${list}-count`).textContent = `${done ? "Done" : "To do"} (${tasks.length})`;
  }
}

function showState({ connected, outbox, tick }) {
  $("state").className = connected ? "on" : "";
  const word = Object.assign(document.createElement("b"), { textContent: connected ? "connected" : "offline" });
  const rest = outbox ? `, ${outbox} to send` : connected ? `, up to date at ${tick}` : ", all sent";
  $("state").replaceChildren(word, rest);
}

// A capability alone, or a link that ends with one.
function capabilityIn(pasted) {
  return pasted.trim().split("#").pop().trim();
}

async function open(capability) {
  const address = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/thin`;
  const party = await connect(address, capability);
  window.planner = party;
  $("enter").hidden = true;
  $("add").hidden = $("lists").hidden = $("switch").hidden = false;
  trouble("");
  party.onStatus(showState);
  showState(party.status());
  party.onRejected(({ reason }) => trouble(`A change was not accepted: ${reason}.`));
  party.query({ type: "task" }).orderBy("title").watch(show, trouble);
  $("add").onsubmit = (event) => {
    event.preventDefault();
    const title = $("title").value.trim();
    if (title) party.create({ type: "task" }, { title, done: false });
    $("title").value = "";
  };
  $("switch").onclick = () => {
    const online = party.offline !== true;
    if (online) party.goOffline();
    else party.goOnline();
    $("switch").textContent = online ? "Go online" : "Go offline";
  };
}

function ask(why) {
  $("state").textContent = "not connected";
  $("enter").hidden = false;
  $("add").hidden = $("lists").hidden = $("switch").hidden = true;
  trouble(why);
}

async function start(capability) {
  $("enter").hidden = true;
  try {
    await open(capability);
  } catch (error) {
    ask(error);
  }
}

$("enter").onsubmit = (event) => {
  event.preventDefault();
  const capability = capabilityIn($("capability").value);
  if (!capability) return trouble("This page needs a capability.");
  $("capability").value = "";
  history.replaceState(null, "", `#${capability}`); // so that a reload opens it again
  start(capability);
};

if (capabilityIn(location.hash)) start(capabilityIn(location.hash));
else ask("This page needs a capability.");
