// SPDX-License-Identifier: Apache-2.0
// The panel's page and the messages it exchanges with the extension.

import type { TurnSummary } from "./agent.js";

export type FromPanel = { type: "ask"; text: string } | { type: "stop" } | { type: "reset" };

export type ToPanel =
  | { type: "text" | "reasoning" | "tool" | "output" | "error"; text: string }
  | { type: "ended"; summary: TurnSummary }
  | { type: "idle" }
  | { type: "cleared" };

/** The page; all it shows is set as text, so nothing a model or a tool says becomes markup. */
export function panelHtml(cspSource: string): string {
  const nonce = globalThis.crypto.randomUUID();
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src ${cspSource} 'nonce-${nonce}'; script-src 'nonce-${nonce}'">
<style nonce="${nonce}">
  body { display: flex; flex-direction: column; height: 100vh; margin: 0; padding: 8px; box-sizing: border-box;
    font-family: var(--vscode-font-family, sans-serif); }
  #log { flex: 1; overflow-y: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
  #log > div { margin: 0 0 8px; }
  .question { font-weight: 600; }
  .reasoning, .ended { opacity: 0.7; font-size: 0.9em; }
  .tool, .output { font-family: var(--vscode-editor-font-family, monospace); font-size: 0.9em; }
  .output { max-height: 12em; overflow-y: auto; opacity: 0.85; }
  .error { color: var(--vscode-errorForeground, #c00); }
  form { display: flex; gap: 4px; padding-top: 8px; }
  textarea { flex: 1; resize: vertical; font: inherit; }
</style>
</head>
<body>
<div id="log" role="log" aria-live="polite"></div>
<form id="form">
  <textarea id="question" rows="3" aria-label="Question" placeholder="Ask the agent"></textarea>
  <button id="send">Send</button>
  <button id="stop" type="button" disabled>Stop</button>
</form>
<script nonce="${nonce}">
${PANEL_SCRIPT}
</script>
</body>
</html>`;
}

const PANEL_SCRIPT = `
const host = acquireVsCodeApi();
const log = document.getElementById("log");
const form = document.getElementById("form");
const question = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
let open = null; // the block that text of its kind is added to

function add(kind, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 20;
  if (open === null || open.className !== kind || (kind !== "text" && kind !== "reasoning")) {
    open = document.createElement("div");
    open.className = kind;
    log.append(open);
  }
  open.append(text);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
function busy(isBusy) {
  send.disabled = isBusy;
  stop.disabled = !isBusy;
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text === "" || send.disabled) return;
  add("question", text);
  question.value = "";
  busy(true);
  host.postMessage({ type: "ask", text });
});
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    form.requestSubmit();
  }
});
stop.addEventListener("click", () => host.postMessage({ type: "stop" }));
window.addEventListener("message", ({ data }) => {
  if (data.type === "idle") busy(false);
  else if (data.type === "cleared") log.replaceChildren();
  else if (data.type === "ended") {
    const { status, inputTokens, cachedTokens, outputTokens, miss } = data.summary;
    const missed = miss === null ? "" : ", missed " + miss.missed_tokens + " (" + miss.reason + ")";
    add("ended", status + ": " + inputTokens + " tokens in, " + cachedTokens + " cached" + missed + ", " + outputTokens + " out");
  } else add(data.type, data.text);
});
`;
