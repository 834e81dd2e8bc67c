// SPDX-License-Identifier: Apache-2.0
// A real appliance for tests: `moorage serve` with the default model on a free port.

import { spawn } from "node:child_process";
import { mkdtemp, open, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));
const PYTHON = process.env.MOORAGE_PYTHON ?? join(ROOT, ".venv/bin/python");
const READY_MS = 180_000;

export class Appliance {
  static async start(settings = []) {
    const folder = await mkdtemp(join(tmpdir(), "mo-"));
    const log = await open(join(folder, "log"), "w");
    const flags = ["server.port=0", `server.state_dir=${folder}/s`, `server.run_dir=${folder}/r`,
      "server.drain_s=1", "engine.drain_s=1", ...settings].flatMap((flag) => ["--set", flag]);
    const child = spawn(PYTHON, ["-m", "appliance", "serve", ...flags], {
      cwd: ROOT,
      stdio: ["ignore", log.fd, log.fd],
    });
    const appliance = new Appliance(folder, child);
    await log.close();
    await appliance.ready();
    return appliance;
  }

  constructor(folder, child) {
    this.folder = folder;
    this.child = child;
  }

  async state() {
    return JSON.parse(await readFile(join(this.folder, "r/state.json"), "utf8"));
  }

  async ready() {
    const until = Date.now() + READY_MS;
    while (Date.now() < until && this.child.exitCode === null) {
      try {
        this.url = (await this.state()).url;
        if ((await fetch(`${this.url}/ready`)).ok) return;
      } catch {
        // not there yet
      }
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    throw new Error(`not ready:\n${(await readFile(join(this.folder, "log"), "utf8")).slice(-3000)}`);
  }

  /** kill -9 one of its processes, as state.json names it: `api` or `engine`. */
  async kill(name) {
    process.kill((await this.state()).pids[name], "SIGKILL");
  }

  async stop() {
    if (this.child.exitCode === null) {
      const ended = new Promise((resolve) => this.child.once("exit", resolve));
      this.child.kill("SIGTERM");
      await ended;
    }
    await rm(this.folder, { recursive: true, force: true });
  }
}
