// SPDX-License-Identifier: Apache-2.0
// The views of the whole appliance: overview and cache. Does not know: sessions' details.

import { ENDPOINTS, Refused, call } from "./api.js";
import { bar, button, card, el, show, table } from "./dom.js";
import { TIERS, bytes, counted, counter, percent, rate, treeOf, whole } from "./facts.js";

const RECENT = 50;
let before = null;

export async function overview(main) {
  const [health, ready, models, page] = await Promise.all([
    call(ENDPOINTS.health), call(ENDPOINTS.ready), call(ENDPOINTS.models),
    call(ENDPOINTS.sessions, {}, { limit: RECENT }),
  ]);
  const isUp = health.engine_ready;
  const cards = [
    card("Model", el("div", { class: "big" }, models.data[0]?.id ?? "-")),
    card("Engine", el("div", { class: `big ${isUp ? "good" : "bad"}` }, isUp ? "up" : "starting or restarting"),
      el("div", { class: health.stalled_turns.length ? "bad" : "soft" }, `${health.stalled_turns.length} turns stalled`)),
    card("Session store", el("div", { class: ready.store.ok ? "big good" : "big bad" }, ready.store.ok ? "up" : "down"),
      el("div", { class: "soft" }, `${ready.store.kind}: ${ready.store.detail}`)),
    ...(isUp ? await engineCards().catch(withoutAdmin) : []),
    recentCard(page.data),
  ];
  const warnings = ready.warnings.map((text) => el("li", { class: "warn" }, text));
  show(main, el("div", { class: "cards" }, ...cards),
    warnings.length ? el("h2", {}, "Warnings") : null, warnings.length ? el("ul", {}, ...warnings) : null);
}

// A tenant's key is enough for the rest of the view.
function withoutAdmin(error) {
  if (!(error instanceof Refused) || ![401, 403].includes(error.status)) throw error;
  return [card("Queue, tiers, leases", el("div", { class: "warn" }, `They need the admin's key (${error.status}).`))];
}

async function engineCards() {
  const [{ instance_id: instance, stats }, tiers, leases] = await Promise.all([
    call(ENDPOINTS.stats), call(ENDPOINTS.tiers), call(ENDPOINTS.allLeases),
  ]);
  const now = { atMs: Date.now(), tokens: stats.output_tokens ?? 0, instance };
  const perSecond = rate(before, now);
  before = now;
  return [
    card("Queue", el("div", { class: "big" }, `${whole(stats.running)} running, ${whole(stats.waiting)} waiting`),
      el("div", { class: "soft" }, `${whole(stats.preemptions ?? 0)} preempted, ${whole(stats.retractions ?? 0)} retracted`)),
    card("Output", el("div", { class: "big" }, perSecond == null ? "-" : `${whole(perSecond)} tokens/s`)),
    card("Prompt cache since the engine's start",
      el("div", { class: "big" }, percent(stats.cached_prompt_tokens, stats.prompt_tokens)),
      el("div", { class: "soft" }, `${whole(stats.cached_prompt_tokens)} of ${whole(stats.prompt_tokens)} tokens`)),
    ...tiers.data.map((tier) => tierCard(tier, stats)),
    card("Leases", el("div", { class: "big" }, `${leases.data.length} live`),
      el("div", { class: "soft" }, `${whole(stats.leased_pages ?? 0)} of ${whole(stats.num_pages)} L1 pages leased, `
        + `${whole(stats.leases_queued ?? 0)} queued`)),
  ];
}

function recentCard(sessions) {
  const usage = sessions.map((session) => session.usage);
  const cached = usage.reduce((sum, one) => sum + one.cache_read, 0);
  const input = usage.reduce((sum, one) => sum + one.input, 0);
  return card(`Prompt cache of the newest ${whole(sessions.length)} sessions`,
    el("div", { class: "big" }, percent(cached, input)),
    el("div", { class: "soft" }, `${whole(cached)} of ${whole(input)} prompt tokens were cached`));
}

function tierCard(tier, stats) {
  const totals = { l1: stats.num_pages, l2: stats.num_l2_pages };
  const total = totals[tier.tier];
  const used = tier.tier === "l1" && total != null ? total - stats.free_pages : tier.num_pages;
  const [part, of] = total ? [used, total] : [tier.used_bytes, tier.capacity_bytes];
  const cls = tier.state === "up" ? "good" : tier.state === "off" ? "soft" : "bad";
  const trips = tier.counters.trips;
  return card(`${tier.tier.toUpperCase()} ${tier.kind}`,
    el("div", {}, el("b", { class: cls }, tier.state), tier.reason ? `: ${tier.reason}` : "",
      trips != null ? `, breaker opened ${whole(trips)} times` : ""),
    bar([[tier.tier, part]], of, `${tier.tier}: ${percent(part, of)} used`),
    el("div", { class: "soft" }, total ? `${whole(used)} of ${whole(total)} pages` : `${whole(used)} pages`,
      `, ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`));
}

const wanted = { session_id: "", depth: "" };

export async function cache(main, refresh) {
  const [tree, top, tiers] = await Promise.all([
    call(ENDPOINTS.tree, {}, { max_nodes: 400, ...wanted }),
    call(ENDPOINTS.top, {}, { limit: 20 }), call(ENDPOINTS.tiers),
  ]);
  const megabytes = (row) => TIERS.map((name) => whole(row.cost[`${name}_byte_s`] / 1e6));
  const link = (id) => el("a", { href: `#session/${encodeURIComponent(id)}`, class: "mono" }, id);
  show(main, el("h2", {}, "Tiers"),
    table(["tier", "kind", "state", ["used", true], ["of", true], ["pages", true], "counters"],
      tiers.data.map((tier) => [tier.tier, tier.kind, tier.reason ? `${tier.state}: ${tier.reason}` : tier.state,
        bytes(tier.used_bytes), bytes(tier.capacity_bytes), whole(tier.num_pages),
        Object.entries(tier.counters).filter(([, n]) => n).map(([name, n]) => `${name.replaceAll("_", " ").replace(/ (bytes|seconds)( per s)?$/, "")} ${counter(name, n)}`).join(", ")]), "no tiers"),
    el("h2", {}, "Who has taken the most (MB s by tier)"),
    table(["session", "tenant", "status", ["tokens", true], ...TIERS.map((name) => [name, true])],
      top.data.map((row) => [link(row.session_id), row.tenant, row.status, whole(row.tokens_total), ...megabytes(row)]), "no sessions"),
    el("h2", {}, "Prefix tree"),
    filters(refresh),
    nodes(treeOf(tree.nodes)),
    tree.truncated ? el("p", { class: "warn" }, "There are more nodes than shown.") : null);
}

function filters(refresh) {
  const field = (name, label, type) => el("label", {}, `${label} `, el("input", {
    id: `tree-${name}`, type, min: type === "number" ? 1 : null, value: wanted[name],
    on: { change: (event) => { wanted[name] = event.target.value.trim(); refresh(); } } }));
  return el("div", { class: "row" }, field("session_id", "Session", "search"), field("depth", "Levels", "number"),
    button("Refresh", refresh, { id: "tree-refresh" }));
}

function nodes({ roots, children }) {
  if (!roots.length) return el("p", { class: "soft" }, "Nothing is resident.");
  const list = (some) => el("ul", {}, ...some.map((node) => {
    const where = TIERS.filter((tier) => node.tiers[tier]).map((tier) => `${tier} ${node.tiers[tier]}`).join(", ");
    const below = children.get(node.node_id);
    return el("li", {}, el("b", {}, counted(node.num_tokens, "token")), ` ${counted(node.num_pages, "page")} (${where || "none"})`,
      node.num_users ? `, ${node.num_users} in use ` : " ", el("code", { class: "soft" }, node.text.slice(0, 80)), below ? list(below) : null);
  }));
  const top = list(roots);
  top.className = "tree";
  return top;
}
