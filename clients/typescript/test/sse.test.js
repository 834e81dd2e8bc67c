// SPDX-License-Identifier: Apache-2.0
// Cases of the WHATWG HTML standard (9.2.6), and: pieces of any size give the same events.

import assert from "node:assert/strict";
import { test } from "node:test";

import { SseParser } from "../dist/index.js";

const CASES = [
  ["data: YHOO\ndata: +2\ndata: 10\n\n", [{ id: "", event: "message", data: "YHOO\n+2\n10" }]],
  [
    ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
    [
      { id: "1", event: "message", data: "first event" },
      { id: "", event: "message", data: "second event" },
      { id: "", event: "message", data: " third event" },
    ],
  ],
  [
    "data\n\ndata\ndata\n\ndata:",
    [
      { id: "", event: "message", data: "" },
      { id: "", event: "message", data: "\n" },
    ],
  ],
  ["data:test\r\n\r\ndata: test\r\r", [
    { id: "", event: "message", data: "test" },
    { id: "", event: "message", data: "test" },
  ]],
  ["\uFEFFevent: turn\nid: 7\ndata: {\"t\": \"\u00e9\u4e16\u{1f600}\"}\n\nevent: half\ndata: x\n", [
    { id: "7", event: "turn", data: "{\"t\": \"\u00e9\u4e16\u{1f600}\"}" },
  ]],
];

function parse(bytes, sizes) {
  const parser = new SseParser();
  const events = [];
  let at = 0;
  for (let turn = 0; at < bytes.length; turn++) {
    const size = sizes(turn);
    events.push(...parser.push(bytes.subarray(at, at + size)));
    at += size;
  }
  return events;
}

for (const [index, [text, expected]] of CASES.entries()) {
  test(`case ${index} parses the same in pieces of every size`, () => {
    // A last \r might be half of \r\n: one more byte tells.
    const bytes = new TextEncoder().encode(text + ":");
    for (let size = 1; size <= bytes.length; size++) {
      assert.deepEqual(parse(bytes, () => size), expected, `pieces of ${size}`);
    }
    assert.deepEqual(parse(bytes, (turn) => 1 + ((turn * 7) % 5)), expected);
  });
}
