// SPDX-License-Identifier: Apache-2.0
// How the page asks the server: the endpoints, the key, what a refusal means, event streams.
// Does not know: what is shown. The key is kept by this tab alone.

const KEY = "moorage.key";
const WAIT_MS = 15000;

export const ENDPOINTS = {
  health: ["GET", "/health"],
  ready: ["GET", "/ready"],
  version: ["GET", "/version"],
  models: ["GET", "/v1/models"],
  stats: ["GET", "/admin/engine/stats"],
  tiers: ["GET", "/admin/tiers"],
  allLeases: ["GET", "/admin/leases"],
  tree: ["GET", "/admin/cache/tree"],
  top: ["GET", "/admin/cache/top"],
  sessions: ["GET", "/v1/sessions"],
  session: ["GET", "/v1/sessions/{session_id}"],
  remove: ["DELETE", "/v1/sessions/{session_id}"],
  cache: ["GET", "/v1/sessions/{session_id}/cache"],
  turns: ["GET", "/v1/sessions/{session_id}/turns"],
  leases: ["GET", "/v1/sessions/{session_id}/leases"],
  cancel: ["POST", "/v1/sessions/{session_id}/turns/{turn_id}/cancel"],
  suspend: ["POST", "/v1/sessions/{session_id}/suspend"],
  resume: ["POST", "/v1/sessions/{session_id}/resume"],
  events: ["GET", "/v1/sessions/{session_id}/events"],
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Unreachable extends Error {}

export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function pathOf(template, ids, query) {
  const path = template.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(ids[name]));
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const tail = new URLSearchParams(given).toString();
  return tail ? `${path}?${tail}` : path;
}

async function ask([method, template], ids, query, signal) {
  const key = getKey();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let reply;
  try {
    reply = await fetch(pathOf(template, ids, query), { method, headers, signal, cache: "no-store" });
  } catch (error) {
    throw new Unreachable(String(error));
  }
  return reply;
}

// `ids` fill the path, `query` goes behind it. Throws Refused or Unreachable.
export async function call(endpoint, ids = {}, query = {}) {
  const reply = await ask(endpoint, ids, query, AbortSignal.timeout(WAIT_MS));
  let body;
  try {
    body = await reply.json();
  } catch {
    throw new Unreachable(`${reply.status} without JSON`);
  }
  if (!reply.ok && endpoint !== ENDPOINTS.ready)
    throw new Refused(reply.status, body?.error?.message ?? `status ${reply.status}`);
  return body;
}

// Calls `tell` with each event until the stream ends. EventSource cannot send a key.
export async function follow(endpoint, ids, tell, signal) {
  const reply = await ask(endpoint, ids, {}, signal);
  if (!reply.ok) throw new Refused(reply.status, `status ${reply.status}`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const feed = eventFeed(tell);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    feed(value);
  }
}

// Takes pieces of a stream, cut anywhere, and tells the JSON of its events.
export function eventFeed(tell) {
  let rest = "";
  return (piece) => {
    rest += piece;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) tell(JSON.parse(line.slice(6)));
  };
}
