// SPDX-License-Identifier: Apache-2.0
// The page: which view is shown, when it is asked for again, what is said where the server refuses.
// Does not know: what a view shows.

import { ENDPOINTS, Refused, Unreachable, follow, getKey, setKey } from "./api.js";
import { button, el, show } from "./dom.js";
import { cache, overview } from "./overview.js";
import { session, sessions } from "./sessions.js";

const EVERY_MS = 2000;
const CALM_MS = 500; // events that come faster are one look
const main = document.getElementById("main");
const notice = document.getElementById("notice");
let timer = 0;
let round = 0;
let stream = null; // {id, stop}: the session whose events are followed

const views = { overview, sessions, cache };

function place() {
  const [name, id] = location.hash.slice(1).split("/");
  return name === "session" && id ? { name, id: decodeURIComponent(id) } : { name: views[name] ? name : "overview" };
}

// Shows the view once, and again later. `first` is done before; then the page goes to `next`.
async function refresh(first, next) {
  clearTimeout(timer);
  const mine = ++round;
  const at = place();
  let isOver = false;
  try {
    if (typeof first === "function") {
      await first();
      if (next) { location.hash = next; return; }
    }
    const target = el("div");
    const isFirst = main.dataset.at !== location.hash;
    const into = isFirst ? target : main;
    if (at.name === "session") await session(into, at.id, refresh, confirmed);
    else await views[at.name](into, refresh);
    if (mine !== round) return;
    if (isFirst) { show(main, ...target.childNodes); main.dataset.at = location.hash; }
    if (typeof first !== "function") say("");
  } catch (error) {
    if (mine !== round) return;
    isOver = !told(error);
  }
  if (at.name === "session" && !isOver) listen(at.id);
  if (!isOver && !document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

// Says what went wrong; false where asking again is no use before somebody does something.
function told(error) {
  if (error instanceof Unreachable) { say("The server is not reachable, trying again."); return true; }
  if (!(error instanceof Refused)) throw error;
  if (error.status === 401 || error.status === 403) {
    const why = getKey() ? `The server refuses this key (${error.status}): ${error.message}.`
      : `The server asks for a key (${error.status}).`;
    say(why);
    show(main, el("p", {}, why, " ", button("Give a key", () => askKey(why))));
    delete main.dataset.at;
    if (!document.getElementById("key-dialog").open) askKey(why);
    return false;
  }
  say(`The server refused (${error.status}): ${error.message}`);
  return error.status >= 500;
}

function say(text) {
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}

const asked = new WeakMap(); // dialog -> what ends its open question

function answerOf(dialog) {
  asked.get(dialog)?.(); // closed, but its event has not come yet
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    const end = () => {
      if (dialog.open) return; // the late event of an earlier question
      dialog.removeEventListener("close", end);
      asked.delete(dialog);
      done(dialog.returnValue === "ok");
    };
    asked.set(dialog, end);
    dialog.addEventListener("close", end);
  });
}

async function askKey(why) {
  const input = document.getElementById("key-input");
  document.getElementById("key-why").textContent = why;
  input.value = "";
  if (await answerOf(document.getElementById("key-dialog"))) {
    setKey(input.value.trim());
    document.getElementById("key-button").hidden = !getKey();
    stop();
    refresh();
  }
  input.value = "";
}

function confirmed(text) {
  document.getElementById("confirm-text").textContent = text;
  return answerOf(document.getElementById("confirm-dialog"));
}

// Looks again as soon as the session's own events say that something happened.
function listen(id) {
  if (stream?.id === id) return;
  stop();
  const control = new AbortController();
  const mine = { id, stop: () => control.abort() };
  stream = mine;
  let soon = 0;
  const tell = () => { clearTimeout(soon); soon = setTimeout(() => { if (stream === mine) refresh(); }, CALM_MS); };
  follow(ENDPOINTS.events, { session_id: id }, tell, control.signal)
    .catch(() => {}) // the timer goes on asking, and says what is wrong
    .finally(() => { if (stream === mine) stream = null; });
}

function stop() {
  stream?.stop();
  stream = null;
}

function go() {
  const { name } = place();
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.hash === `#${name === "session" ? "sessions" : name}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  stop();
  refresh();
}

window.addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { clearTimeout(timer); stop(); } else refresh();
});
const keyButton = document.getElementById("key-button");
keyButton.hidden = !getKey();
keyButton.addEventListener("click", () => askKey("Another key for this tab."));
go();
