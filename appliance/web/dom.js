// SPDX-License-Identifier: Apache-2.0
// Builds elements. Whatever comes from a server or a client goes in as text, never as markup.
// Does not know: what is shown.

export function el(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (key === "class") node.className = value;
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, String(value));
  }
  node.append(...children.filter((child) => child != null).map(asNode));
  return node;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

export const button = (text, run, options = {}) => el("button", { type: "button", on: { click: run }, ...options }, text);

// parts: [[class, amount]...]; what is left of `total` stays empty.
export function bar(parts, total, label) {
  const node = el("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [name, amount] of parts) {
    const piece = el("span", { class: name });
    piece.style.width = `${total > 0 ? Math.min(100, (100 * amount) / total) : 0}%`;
    node.append(piece);
  }
  return node;
}

export const card = (title, ...children) => el("section", { class: "card" }, el("h3", {}, title), ...children);

// heads: names, or [name, is_number]; rows: arrays of cells, each text or an element.
export function table(heads, rows, empty) {
  if (!rows.length) return el("p", { class: "soft" }, empty);
  const isNumber = heads.map((head) => Array.isArray(head) && head[1]);
  const cls = (at) => (isNumber[at] ? "num" : "");
  const top = heads.map((head, at) => el("th", { class: cls(at), scope: "col" }, Array.isArray(head) ? head[0] : head));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, at) => el("td", { class: cls(at) }, cell ?? "-"))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...top)), el("tbody", {}, ...body)));
}

// Replaces what is shown, and keeps the focus where an element of the same id is there again.
export function show(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement.id : "";
  node.replaceChildren(...children.filter((child) => child != null));
  if (focused) document.getElementById(focused)?.focus();
}

export function tierKey() {
  const names = [["l1", "L1 device"], ["l2", "L2 host"], ["l3", "L3 store"], ["none", "none: to compute"]];
  return el("p", { class: "key soft" }, "Tokens by tier:", ...names.map(([cls, text]) => el("span", {}, el("i", { class: cls }), text)));
}
