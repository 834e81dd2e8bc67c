// SPDX-License-Identifier: Apache-2.0
// The agent without an editor, against the real server and its default model.

import assert from "node:assert/strict";
import { mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { Moorage } from "@moorage/client";

import { Appliance } from "../../../clients/typescript/test/server.js";
import { Agent } from "../out/agent.js";
import { ToolBox } from "../out/tools.js";

let appliance;
let folder;
let client;

before(async () => {
  folder = await mkdtemp(join(tmpdir(), "ws-"));
  await writeFile(join(folder, "hello.py"), "print('hello')\n");
  appliance = await Appliance.start();
  client = new Moorage({ baseUrl: appliance.url });
});
after(async () => {
  await appliance?.stop();
  await rm(folder, { recursive: true, force: true });
});

class Memory {
  values = new Map();
  get(key) {
    return this.values.get(key);
  }
  async set(key, value) {
    if (value === undefined) this.values.delete(key);
    else this.values.set(key, value);
  }
}

class Shown {
  said = "";
  calls = [];
  outputs = [];
  turns = [];
  onText = () => undefined;
  text(delta) {
    this.said += delta;
    this.onText(this.said);
  }
  reasoning() {}
  toolStarted(call) {
    this.calls.push(call);
  }
  toolEnded(call, output, isFailed) {
    this.outputs.push({ output, isFailed });
  }
  turnEnded(summary) {
    this.turns.push(summary);
  }
}

function agentWith(storage, options = {}) {
  return new Agent({ client, model: "default", storage, tools: new ToolBox(folder), workspace: "demo", maxTurns: 2, turn: { temperature: 0, max_output_tokens: 40 }, ...options });
}

test("a tool the model calls runs in the workspace, and its result reaches the model", async () => {
  const storage = new Memory();
  const agent = agentWith(storage);
  const shown = new Shown();
  const turn = { tool_choice: { type: "function", name: "run_command" }, temperature: 0, max_output_tokens: 120 };
  await agent.ask("Run the command `cat hello.py`.", shown, turn);
  assert.equal(shown.calls[0].name, "run_command");
  assert.match(shown.outputs[0].output, /\[exit \d+\]$/);
  const items = (await client.listItems(agent.sessionId, { order: "asc", limit: 100 })).data;
  const result = items.find((item) => item.type === "function_call_output");
  assert.deepEqual([result.call_id, result.output], [shown.calls[0].call_id, shown.outputs[0].output]);
  assert.ok(shown.turns[1].cachedTokens > 0.8 * (shown.turns[1].inputTokens - 100));
});

test("another start of the editor goes on with the workspace's session and its cache", async () => {
  const storage = new Memory();
  const settings = { temperature: 0, max_output_tokens: 8, tool_choice: "none" };
  const first = agentWith(storage);
  await first.ask("Remember the word anchor.", new Shown(), settings);
  const second = agentWith(storage);
  const shown = new Shown();
  await second.ask("Which word?", shown, settings);
  assert.equal(second.sessionId, first.sessionId);
  assert.ok(shown.turns[0].cachedTokens > 0.8 * (shown.turns[0].inputTokens - 40), JSON.stringify(shown.turns));
  assert.equal(shown.turns[0].miss, null);
});

test("an answer goes on, and stays whole, when both processes of the server are killed", async () => {
  const agent = agentWith(new Memory());
  const shown = new Shown();
  let numKilled = 0;
  shown.onText = (said) => {
    if (said.length > 20 && numKilled === 0) {
      numKilled = 1;
      void appliance.kill("engine");
    } else if (said.length > 150 && numKilled === 1) {
      numKilled = 2;
      void appliance.kill("api");
    }
  };
  const turn = { temperature: 0, max_output_tokens: 120, tool_choice: "none" };
  await agent.ask("Tell me a story about a harbour.", shown, turn);
  assert.equal(numKilled, 2);
  const items = (await client.listItems(agent.sessionId, { order: "asc" })).data;
  assert.equal(items.at(-1).content.map((part) => part.text).join(""), shown.said);
  assert.equal(items.length, 2, "one question, one answer");
});

test("a session that is gone is replaced, and stop keeps what was said", async () => {
  const storage = new Memory();
  const agent = agentWith(storage);
  const brief = { temperature: 0, max_output_tokens: 4, tool_choice: "none" };
  await agent.ask("Hi.", new Shown(), brief);
  const old = agent.sessionId;
  await client.closeSession(old);
  const shown = new Shown();
  shown.onText = (said) => {
    if (said.length > 40) void agent.stop();
  };
  await agent.ask("Tell me a long story.", shown, { ...brief, max_output_tokens: 400 });
  assert.notEqual(agent.sessionId, old);
  assert.equal(shown.turns[0].status, "cancelled");
  const items = (await client.listItems(agent.sessionId, { order: "asc" })).data;
  assert.equal(items.at(-1).content.map((part) => part.text).join(""), shown.said);
});

test("tools stay inside the workspace, ask before they change it, and report what fails", async () => {
  const asked = [];
  const tools = new ToolBox(folder, async (what) => {
    asked.push(what);
    return !what.includes("refuse");
  });
  const run = (name, args) => tools.run(name, JSON.stringify(args));
  assert.deepEqual(await run("list_files", { path: "." }), { output: "hello.py", isFailed: false });
  assert.equal((await run("read_file", { path: "hello.py" })).output, "print('hello')\n");
  await run("write_file", { path: "a/b.txt", content: "x" });
  assert.equal(await readFile(join(folder, "a/b.txt"), "utf8"), "x");
  await symlink("/etc", join(folder, "out"));
  for (const path of ["../x", "/etc/passwd", "out/passwd", "a/../../x"]) {
    for (const name of ["read_file", "write_file"]) {
      const { output, isFailed } = await run(name, { path, content: "x" });
      assert.ok(isFailed && output.includes("outside the workspace"), `${name} ${path}: ${output}`);
    }
  }
  assert.deepEqual(await run("run_command", { command: "exit 3" }), { output: "[exit 3]", isFailed: false });
  assert.deepEqual(await run("run_command", { command: "cat" }), { output: "[exit 0]", isFailed: false });
  assert.equal((await run("run_command", { command: "refuse" })).output, "error: the user refused");
  assert.deepEqual(asked, ["write a/b.txt", "run exit 3", "run cat", "run refuse"]);
  assert.ok((await tools.run("read_file", "{")).isFailed);
  assert.ok((await run("nothing", {})).isFailed);
});
