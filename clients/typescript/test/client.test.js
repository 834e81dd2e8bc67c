// SPDX-License-Identifier: Apache-2.0
// The client against the real server and its default model.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { ApiError, ConnectionError, isTerminal, Moorage } from "../dist/index.js";
import { Appliance } from "./server.js";

let appliance;
let client;

before(async () => {
  appliance = await Appliance.start();
  client = new Moorage({ baseUrl: appliance.url });
});
after(() => appliance?.stop());

const GREEDY = { temperature: 0 };

async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

function textOf(events) {
  return events
    .filter((event) => event.type === "response.output_text.delta")
    .map((event) => event.delta)
    .join("");
}

test("a streamed turn gives numbered events, its text, and the turn as it ended", async () => {
  const session = await client.createSession({ model: "default", instructions: "Be brief." });
  const stream = client.streamTurn(session.id, {
    input: "What is the capital of France?", max_output_tokens: 24, ...GREEDY,
  });
  const events = await collect(stream);
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, i) => i + 1));
  assert.equal(events[0].type, "turn.created");
  const last = events.at(-1);
  assert.ok(isTerminal(last));
  assert.equal(events.filter(isTerminal).length, 1);
  const message = last.turn.output.find((item) => item.type === "message");
  assert.equal(textOf(events), message.content.map((part) => part.text).join(""));
  const stored = await client.getTurn(session.id, last.turn_id);
  assert.deepEqual(stored, last.turn);
  const transcript = await client.listItems(session.id, { order: "asc" });
  assert.deepEqual(transcript.data.map((item) => item.type), ["message", "message"]);
  assert.equal((await client.tokens(session.id)).token_ids.length, (await client.getSession(session.id)).num_tokens);
});

test("a call that is forced comes back whole, its result is sent, and the next turn runs", async () => {
  const session = await client.createSession({
    model: "default",
    tools: [{
      type: "function", name: "get_weather", description: "Weather of a city",
      parameters: { type: "object", properties: { city: { type: "string", enum: ["Paris", "Rome"] } }, required: ["city"] },
    }],
  });
  const turn = await client.runTurn(session.id, {
    input: "How is the weather in Paris?", tool_choice: "required", max_output_tokens: 80, ...GREEDY,
  });
  assert.equal(turn.stop_reason, "tool_use");
  const call = turn.output.find((item) => item.type === "function_call");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(call.arguments).city));
  assert.deepEqual((await client.getSession(session.id)).open_calls, [{ call_id: call.call_id, name: "get_weather" }]);
  const signal = await client.signal(session.id, { type: "tool.started", call_id: call.call_id, eta_ms: 500 });
  assert.equal(signal.object, "session.signal");
  const next = await client.runTurn(session.id, {
    input: [{ type: "function_call_output", call_id: call.call_id, output: "18 C, sunny" }],
    max_output_tokens: 8, tool_choice: "none", ...GREEDY,
  });
  assert.ok(next.usage.input_tokens_details.cached_tokens > 0.5 * next.usage.input_tokens);
});

test("a stream goes on with the next event after the API process was killed", async () => {
  const session = await client.createSession({ model: "default" });
  const body = { input: "Count from one to fifty in words.", max_output_tokens: 150, ignore_eos: true, ...GREEDY };
  const events = [];
  for await (const event of client.streamTurn(session.id, body)) {
    events.push(event);
    if (events.length === 8) await appliance.kill("api");
  }
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, i) => i + 1), "none twice, none lost");
  const last = events.at(-1);
  assert.equal(last.type, "turn.incomplete");
  const message = last.turn.output.find((item) => item.type === "message");
  assert.equal(textOf(events), message.content.map((part) => part.text).join(""));
  assert.equal((await client.listTurns(session.id)).data.length, 1, "one turn, whatever was sent again");
});

test("a turn asked for twice under one key is one turn", async () => {
  const session = await client.createSession({ model: "default" });
  const body = { input: "Say hello.", max_output_tokens: 8, ...GREEDY };
  const options = { idempotencyKey: "same" };
  const turns = await Promise.all([1, 2, 3].map(() => client.runTurn(session.id, body, options)));
  assert.equal(new Set(turns.map((turn) => turn.id)).size, 1);
});

test("a cancel ends the stream with turn.cancelled, and the session is usable", async () => {
  const session = await client.createSession({ model: "default" });
  const stream = client.streamTurn(session.id, { input: "Tell a long story.", max_output_tokens: 400, ignore_eos: true });
  let last;
  let isAsked = false;
  for await (const event of stream) {
    last = event;
    if (!isAsked && event.type === "response.output_text.delta") {
      isAsked = true;
      const turn = await stream.cancel();
      assert.equal(turn.status, "cancelled");
    }
  }
  assert.equal(last.type, "turn.cancelled");
  const next = await client.runTurn(session.id, { input: "And now?", max_output_tokens: 4, ...GREEDY });
  assert.ok(["completed", "incomplete"].includes(next.status));
});

test("forks share a history, rollback drops a turn, a lease is granted and released", async () => {
  const session = await client.createSession({
    model: "default", instructions: "Answer in one word. ".repeat(30), metadata: { suite: "ts" },
  });
  const first = await client.runTurn(session.id, { input: "One.", max_output_tokens: 4, ...GREEDY });
  await client.runTurn(session.id, { input: "Two.", max_output_tokens: 4, ...GREEDY });
  const { data } = await client.fork(session.id, { at: first.id, n: 2 });
  assert.equal(data.length, 2);
  for (const child of data) assert.equal(child.parent_session_id, session.id);
  const rolled = await client.rollback(session.id, first.id);
  assert.equal(rolled.num_items, 2);
  const lease = await client.lease(session.id, { ttl: "30s" });
  assert.ok(["granted", "clipped"].includes(lease.state), JSON.stringify(lease));
  assert.equal((await client.listLeases(session.id)).data.length, 1);
  assert.equal((await client.releaseLease(session.id, lease.id)).deleted, true);
  const listed = await client.listSessions({ metadata: { suite: "ts" } });
  const ids = [session, ...data].map((one) => one.id);
  assert.deepEqual(listed.data.map((one) => one.id).sort(), ids.sort(), "forks keep the metadata");
  assert.equal((await client.closeSession(session.id)).deleted, true);
});

test("a refusal is an ApiError with the server's code and field", async () => {
  await assert.rejects(client.getSession("sess_none"), (error) => {
    assert.ok(error instanceof ApiError);
    assert.deepEqual([error.status, error.code], [404, "session_not_found"]);
    return true;
  });
  await assert.rejects(client.createSession({ model: "default", colour: "red" }), (error) => {
    assert.deepEqual([error.status, error.code, error.param], [400, "unknown_field", "colour"]);
    return true;
  });
  const session = await client.createSession({ model: "default" });
  const stream = client.streamTurn(session.id, { input: "x", temperature: -1 });
  await assert.rejects(stream.finalTurn(), (error) => error instanceof ApiError && error.param === "temperature");
});

test("no server is a ConnectionError once patience is over", async () => {
  const nobody = new Moorage({ baseUrl: "http://127.0.0.1:9", patienceMs: 300 });
  await assert.rejects(nobody.getSession("sess_x"), (error) =>
    error instanceof ConnectionError && error.message.startsWith("http://127.0.0.1:9: "));
});

test("the address may be what OpenAI's clients are given", async () => {
  for (const tail of ["/", "/v1", "/v1/"]) {
    const same = new Moorage({ baseUrl: appliance.url + tail });
    const session = await same.createSession({ model: "default" });
    assert.equal((await client.getSession(session.id)).id, session.id);
  }
});
