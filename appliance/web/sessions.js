// SPDX-License-Identifier: Apache-2.0
// The views of sessions: the table, and one session with its turns. Does not know: the appliance.

import { ENDPOINTS, call } from "./api.js";
import { bar, button, el, show, table, tierKey } from "./dom.js";
import { REASONS, ago, calls, matches, nameOf, percent, recentShare, reuse, searchOf, shares, sorted, stateOf, whole } from "./facts.js";

const STATUSES = ["", "idle", "queued", "running", "requires_action", "suspended", "expired", "failed"];
const PAGE = 25;
const AT_ONCE = 4;
const FRESH_MS = 10000;
const MAX_TURNS = 100;

const list = { status: "", search: "", by: "", isUp: false, after: [""] };
const looks = new Map(); // by session: its cache view, when and of what revision

const share = (cache) => { const found = reuse(cache); return found && found.total ? found.cached / found.total : null; };
const COLUMNS = [
  ["session", (row) => row.session.id], ["name", (row) => nameOf(row.session)], ["tenant", (row) => row.session.tenant],
  ["state", (row) => row.session.status], ["turns", (row) => row.look?.num_turns], ["tokens", (row) => row.session.num_tokens],
  ["by tier", (row) => row.look?.resident?.l1], ["last active", (row) => row.session.updated_at],
  ["cached lately", (row) => recentShare(row.look)], ["cached last", (row) => share(row.look?.last_turn)],
  ["last miss", (row) => row.look?.miss?.reason],
];
const NUMBERS = new Set(["turns", "tokens", "cached lately", "cached last"]);

export async function sessions(main, refresh) {
  const { query, words } = searchOf(list.search);
  const page = await call(ENDPOINTS.sessions, {}, { limit: PAGE, status: list.status, after: list.after.at(-1), ...query });
  await lookAt(page.data);
  const kept = page.data.filter((session) => !words || matches(session, words));
  let rows = kept.map((session) => ({ session, look: looks.get(session.id)?.look }));
  const column = COLUMNS.find(([name]) => name === list.by);
  if (column) rows = sorted(rows, column[1], list.isUp);
  if (main.contains(document.activeElement) && ["INPUT", "SELECT"].includes(document.activeElement.tagName)) {
    document.getElementById("rows")?.replaceWith(body(rows, page, refresh));
    return;
  }
  show(main, el("h2", {}, "Sessions"), controls(refresh), tierKey(), body(rows, page, refresh));
}

// The cache views of sessions that changed or have not been looked at for a while, a few at once.
async function lookAt(found) {
  const due = found.filter((session) => {
    const known = looks.get(session.id);
    return !known || known.revision !== session.revision || Date.now() - known.atMs > FRESH_MS;
  });
  const work = async () => {
    for (let session = due.pop(); session; session = due.pop()) {
      const look = await call(ENDPOINTS.cache, { session_id: session.id }).catch(() => null);
      looks.set(session.id, { look, revision: session.revision, atMs: Date.now() });
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  const ids = new Set(found.map((session) => session.id));
  for (const id of looks.keys()) if (!ids.has(id)) looks.delete(id);
}

function controls(refresh) {
  const restart = () => { list.after = [""]; refresh(); };
  const select = el("select", { id: "status", on: { change: (event) => { list.status = event.target.value; restart(); } } },
    ...STATUSES.map((status) => el("option", { value: status, selected: status === list.status }, status || "any")));
  const search = el("input", { id: "search", type: "search", value: list.search, placeholder: "words, or key=value",
    on: { change: (event) => { list.search = event.target.value; restart(); } } });
  return el("div", { class: "row" }, el("label", {}, "State ", select), el("label", {}, "Find ", search),
    el("span", { class: "soft" }, "Words are looked for on this page; key=value in the metadata of all."));
}

function body(rows, page, refresh) {
  const sortBy = (name) => { list.isUp = list.by === name ? !list.isUp : true; list.by = name; refresh(); };
  const head = COLUMNS.map(([name]) => el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "",
    "aria-sort": list.by === name ? (list.isUp ? "ascending" : "descending") : null },
  button(`${name}${list.by === name ? (list.isUp ? " ^" : " v") : ""}`, () => sortBy(name), { id: `by-${name}` })));
  const turn = (after) => { list.after = after; refresh(); };
  const shown = rows.length
    ? el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows.map(sessionRow))))
    : el("p", { class: "soft" }, "No sessions here.");
  return el("div", { id: "rows" }, shown, el("div", { class: "row" },
    button("Newer", () => turn(list.after.slice(0, -1)), { id: "newer", disabled: list.after.length < 2 }),
    button("Older", () => turn([...list.after, page.last_id]), { id: "older", disabled: !page.has_more }),
    el("span", { class: "soft" }, `Page ${list.after.length}; sorted within the page.`)));
}

const link = (id) => el("a", { href: `#session/${encodeURIComponent(id)}`, class: "mono", title: id, id: `to-${id}` }, id);

function tierBar(look, total) {
  const parts = look ? shares(look.resident, total) : null;
  if (!parts) return "-";
  return bar(parts, total, parts.map(([tier, tokens]) => `${tier} ${whole(tokens)}`).join(", "));
}

const sharePercent = (part) => (part == null ? "-" : percent(part, 1));

function sessionRow({ session, look }) {
  const name = nameOf(session);
  return el("tr", {}, el("td", { class: "id" }, link(session.id)), el("td", { class: "long", title: name }, name || "-"),
    el("td", { class: "long", title: session.tenant }, session.tenant), el("td", {}, stateOf(session, look?.resident)),
    el("td", { class: "num", title: `revision ${session.revision}` }, whole(look?.num_turns)),
    el("td", { class: "num" }, whole(session.num_tokens)), el("td", {}, tierBar(look, session.num_tokens)),
    el("td", {}, `${ago(session.updated_at, Date.now())} ago`), el("td", { class: "num" }, sharePercent(recentShare(look))),
    el("td", { class: "num" }, sharePercent(share(look?.last_turn))),
    el("td", {}, look?.miss ? `${look.miss.reason} (${whole(look.miss.missed_tokens)})` : "-"));
}

export async function session(main, id, refresh, confirmed) {
  const ids = { session_id: id };
  const [found, look, turns, leases, children] = await Promise.all([
    call(ENDPOINTS.session, ids), call(ENDPOINTS.cache, ids), call(ENDPOINTS.turns, ids),
    call(ENDPOINTS.leases, ids), call(ENDPOINTS.sessions, {}, { parent_session_id: id, limit: 100 }),
  ]);
  const parent = found.parent_session_id;
  show(main, el("h2", {}, nameOf(found) || "Session", " ", el("span", { class: "mono soft" }, id)),
    actions(found, refresh, confirmed), tierKey(), tierBar(look, found.num_tokens),
    el("p", {}, `${stateOf(found, look.resident)}; revision ${found.revision}; ${whole(found.num_tokens)} tokens, `
      + `${whole(look.shared_tokens)} shared, ${whole(look.leased)} leased; ${found.num_items} items; model ${found.model}; tenant ${found.tenant}; `
      + `active ${ago(found.updated_at, Date.now())} ago`),
    found.open_calls.length ? el("p", { class: "warn" }, "Waits for: ", found.open_calls.map((one) => one.name).join(", ")) : null,
    found.error ? el("p", { class: "bad" }, `${found.error.code}: ${found.error.message}`) : null,
    el("p", {}, "Parent: ", parent ? link(parent) : "none"),
    el("p", {}, "Children: ", ...(children.data.length ? children.data.flatMap((one) => [link(one.id), " "]) : ["none"]), children.has_more ? "and more" : ""),
    el("h2", {}, "Leases"), table(["lease", "tier", "state", ["tokens", true], "ends", "reason"],
      leases.data.map((one) => [el("code", {}, one.id), one.tier, one.state, `${whole(one.tokens_granted)} of ${whole(one.tokens_requested)}`,
        new Date(one.expires_at * 1000).toLocaleTimeString(), one.reason]), "No leases."),
    el("h2", {}, "Turns"), recentLine(look), turns.data.length > MAX_TURNS ? el("p", { class: "soft" }, `The last ${MAX_TURNS} of ${whole(turns.data.length)}.`) : null,
    table([["n", true], "status", ["input", true], ["cached l1/l2/l3", true], ["cached", true], ["computed", true], ["output", true], ["TTFT ms", true], "tool calls", "miss"],
      turns.data.map(turnCells).slice(-MAX_TURNS).reverse(), "No turns."));
}

function recentLine({ recent_turns: recent }) {
  if (!recent.turns) return null;
  return el("p", {}, `The last ${whole(recent.turns)} found ${percent(recent.cached_tokens, recent.prompt_tokens)} of their prompts cached: `
    + `${whole(recent.cached_tokens)} of ${whole(recent.prompt_tokens)} tokens.`);
}

function turnCells(turn, at) {
  const { usage = {}, cache = {}, timings = {} } = turn;
  const tiers = ["l1", "l2", "l3"].map((tier) => cache[`cached_${tier}`] ?? "-").join("/");
  const why = cache.miss && `${cache.miss.reason}: ${REASONS[cache.miss.reason] ?? "see the docs"}; ${whole(cache.miss.missed_tokens)} tokens`
    + (cache.miss.first_diverging_item ? ` from ${cache.miss.first_diverging_item}` : "");
  return [at + 1, turn.error ? `${turn.status}: ${turn.error.code}` : turn.status, whole(usage.input_tokens), tiers, sharePercent(share(cache)), whole(cache.computed),
    whole(usage.output_tokens), whole(timings.first_token_ms), calls(turn).join(", ") || "-", why || "-"];
}

function actions(found, refresh, confirmed) {
  const ids = { session_id: found.id, turn_id: found.current_turn };
  const act = (endpoint) => async () => { await refresh(() => call(endpoint, ids)); };
  const remove = async () => {
    if (!(await confirmed(`Delete ${found.id}, its transcript and its cache? This cannot be undone.`))) return;
    await refresh(() => call(ENDPOINTS.remove, ids), "#sessions");
  };
  const isBusy = found.current_turn !== null;
  return el("div", { class: "row" },
    button("Cancel turn", act(ENDPOINTS.cancel), { id: "cancel", disabled: !isBusy }),
    button("Suspend", act(ENDPOINTS.suspend), { id: "suspend", disabled: isBusy || found.status === "suspended" }),
    button("Resume", act(ENDPOINTS.resume), { id: "resume", disabled: found.status !== "suspended" }),
    button("Delete", remove, { id: "delete", class: "danger" }));
}
