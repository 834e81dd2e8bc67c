// SPDX-License-Identifier: Apache-2.0
// What the server's answers mean, as numbers and words. Does not know: the page, the network.

export const TIERS = ["l1", "l2", "l3"];

export const REASONS = {
  evicted: "its pages made room for others",
  part_page: "lower tiers keep whole pages: the last tokens were in L1 alone",
  suspended: "a suspend did not keep it",
  engine_restarted: "the engine was restarted",
  model_changed: "the model is another",
  settings_changed: "instructions or tools were changed",
  compacted: "the history was compacted",
  reasoning_dropped: "earlier reasoning was taken out of the history",
};

export const whole = (n) => (n == null ? "-" : Math.round(n).toLocaleString("en"));

export const percent = (part, total) =>
  part == null || !total ? "-" : `${((100 * part) / total).toFixed(1)} %`;

export function bytes(n) {
  if (n == null) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at++) n /= 1024;
  return `${n.toFixed(at ? 1 : 0)} ${units[at]}`;
}

// A counter of the server by its name: bytes as such, seconds with their parts.
export function counter(name, n) {
  if (name.includes("bytes")) return `${bytes(n)}${name.endsWith("_per_s") ? "/s" : ""}`;
  return name.endsWith("seconds") ? `${n.toFixed(2)} s` : whole(n);
}

export const counted = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

export function ago(seconds, nowMs) {
  const s = Math.max(0, Math.round(nowMs / 1000 - seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

// Tokens found in the cache of all prompt tokens of a turn; null where that is not known.
export function reuse(cache) {
  if (!cache || cache.computed == null) return null;
  const cached = TIERS.reduce((sum, tier) => sum + (cache[`cached_${tier}`] ?? 0), 0);
  return { cached, total: cached + cache.computed };
}

// The share of prompt tokens that the last turns found in the cache; null where none is known.
export const recentShare = (look) => {
  const recent = look?.recent_turns;
  return recent?.prompt_tokens ? recent.cached_tokens / recent.prompt_tokens : null;
};

// [[tier, tokens]...] of a session, what no tier has as "none"; null where that is not known.
export function shares(resident, total) {
  if (!resident) return null;
  const parts = TIERS.map((tier) => [tier, resident[tier] ?? 0]);
  const found = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  return [...parts, ["none", Math.max(0, total - found)]];
}

// Idle with nothing in L1 and something below is what a demotion leaves.
export function stateOf(session, resident) {
  const isParked = ["idle", "requires_action"].includes(session.status) && resident
    && !resident.l1 && (resident.l2 || resident.l3);
  return isParked ? `${session.status}, parked` : session.status;
}

export function nameOf(session) {
  const metadata = session.metadata ?? {};
  const name = metadata.name ?? metadata.title;
  if (name) return String(name);
  return Object.entries(metadata).filter(([, value]) => value !== "").map(([key, value]) => `${key}=${value}`).join(", ");
}

export const matches = (session, words) =>
  [session.id, session.model, ...Object.entries(session.metadata ?? {}).flat()]
    .some((text) => String(text).toLowerCase().includes(words.toLowerCase()));

// A new array; what has no value comes last in both directions.
export function sorted(rows, valueOf, isUp) {
  return [...rows].sort((left, right) => {
    const [a, b] = [valueOf(left), valueOf(right)];
    if (a == null || b == null) return (a == null) - (b == null);
    const order = a < b ? -1 : a > b ? 1 : 0;
    return isUp ? order : -order;
  });
}

// Tokens a second between two looks; null at first and where another engine has begun to count.
export function rate(before, now) {
  if (!before || now.atMs <= before.atMs || before.instance !== now.instance) return null;
  const tokens = now.tokens - before.tokens;
  return tokens < 0 ? null : (1000 * tokens) / (now.atMs - before.atMs);
}

export function calls(turn) {
  return (turn.output ?? []).filter((item) => item.type === "function_call").map((item) => item.name);
}

// {roots, children: Map(parent id -> nodes)}; a node whose parent is not shown is a root.
export function treeOf(nodes) {
  const known = new Set(nodes.map((node) => node.node_id));
  const children = new Map();
  const roots = [];
  for (const node of nodes) {
    if (!known.has(node.parent_id)) roots.push(node);
    else children.set(node.parent_id, [...(children.get(node.parent_id) ?? []), node]);
  }
  return { roots, children };
}

// A number, `key=value` or words: what the server filters by, and what the page does.
export function searchOf(text) {
  const pair = /^([^=\s]+)=(.+)$/.exec(text.trim());
  if (pair) return { query: { [`metadata[${pair[1]}]`]: pair[2] }, words: "" };
  return { query: {}, words: text.trim() };
}
