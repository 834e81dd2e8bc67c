// SPDX-License-Identifier: Apache-2.0
// Tools that work on one folder and never outside it. Knows nothing of sessions or VS Code.

import { spawn } from "node:child_process";
import { mkdir, readdir, readFile, realpath, writeFile } from "node:fs/promises";
import { dirname, join, relative, resolve, sep } from "node:path";

import type { Tool } from "@moorage/client";

export interface ToolResult {
  output: string;
  isFailed: boolean;
}

/** Asks the user; false refuses. */
export type Confirm = (what: string) => Promise<boolean>;

const MAX_OUTPUT = 20_000;
const COMMAND_MS = 120_000;
const MAX_ENTRIES = 500;
const SKIPPED = new Set([".git", "node_modules", ".venv"]);

const PATH = { type: "string", description: "Path below the workspace" };

export class ToolBox {
  readonly #root: string;
  readonly #confirm: Confirm;

  constructor(root: string, confirm: Confirm = async () => true) {
    this.#root = resolve(root);
    this.#confirm = confirm;
  }

  definitions(): Tool[] {
    return [
      tool("list_files", "List files below a folder.", { path: PATH }),
      tool("read_file", "Read a text file.", { path: PATH }),
      tool("write_file", "Create or replace a text file.", { path: PATH, content: { type: "string" } }),
      tool("run_command", "Run a shell command in the workspace.", { command: { type: "string" } }),
    ];
  }

  /** Run a call; whatever goes wrong is an output that says so. */
  async run(name: string, argumentsJson: string): Promise<ToolResult> {
    try {
      const args = JSON.parse(argumentsJson) as Record<string, unknown>;
      return { output: clipped(await this.#call(name, args)), isFailed: false };
    } catch (error) {
      return { output: `error: ${error instanceof Error ? error.message : String(error)}`, isFailed: true };
    }
  }

  #call(name: string, args: Record<string, unknown>): Promise<string> {
    const text = (field: string): string => {
      if (typeof args[field] !== "string") throw new Error(`${field} must be a string`);
      return args[field];
    };
    switch (name) {
      case "list_files":
        return this.#list(text("path"));
      case "read_file":
        return this.#inside(text("path")).then((path) => readFile(path, "utf8"));
      case "write_file":
        return this.#write(text("path"), text("content"));
      case "run_command":
        return this.#command(text("command"));
      default:
        throw new Error(`there is no tool ${name}`);
    }
  }

  /** The real path, which must lie below the root whatever links say. */
  async #inside(path: string): Promise<string> {
    const root = await realpath(this.#root);
    const wanted = resolve(root, path);
    let known = wanted;
    for (;;) {
      try {
        known = await realpath(known);
        break;
      } catch {
        known = dirname(known); // not there yet: its parent decides
      }
    }
    for (const found of [wanted, known]) {
      if (found !== root && !found.startsWith(root + sep)) throw new Error(`${path} is outside the workspace`);
    }
    return wanted;
  }

  async #list(path: string): Promise<string> {
    const found: string[] = [];
    const root = await realpath(this.#root);
    const folders = [await this.#inside(path)];
    while (folders.length > 0 && found.length < MAX_ENTRIES) {
      const folder = folders.shift() as string;
      const entries = await readdir(folder, { withFileTypes: true });
      for (const entry of entries.sort((a, b) => a.name.localeCompare(b.name))) {
        const full = join(folder, entry.name);
        if (entry.isDirectory() && !SKIPPED.has(entry.name)) folders.push(full);
        else if (entry.isFile()) found.push(relative(root, full));
      }
    }
    return found.slice(0, MAX_ENTRIES).join("\n") || "(no files)";
  }

  async #write(path: string, content: string): Promise<string> {
    const full = await this.#inside(path);
    if (!(await this.#confirm(`write ${path}`))) throw new Error("the user refused");
    await mkdir(dirname(full), { recursive: true });
    await writeFile(full, content);
    return `wrote ${Buffer.byteLength(content)} bytes to ${path}`;
  }

  async #command(command: string): Promise<string> {
    if (!(await this.#confirm(`run ${command}`))) throw new Error("the user refused");
    return new Promise((settle, fail) => {
      const child = spawn("sh", ["-c", command], {
        cwd: this.#root,
        stdio: ["ignore", "pipe", "pipe"], // a command that reads would wait for ever
        timeout: COMMAND_MS,
      });
      let output = "";
      for (const pipe of [child.stdout, child.stderr]) {
        pipe.setEncoding("utf8").on("data", (piece: string) => {
          if (output.length < 2 * MAX_OUTPUT) output += piece;
        });
      }
      child.once("error", fail);
      child.once("close", (code, signal) => settle(`${output}\n[exit ${code ?? signal}]`.trimStart()));
    });
  }
}

function tool(name: string, description: string, properties: Record<string, unknown>): Tool {
  const required = Object.keys(properties);
  const parameters = { type: "object", properties, required, additionalProperties: false };
  return { type: "function", name, description, parameters };
}

function clipped(text: string): string {
  if (text.length <= MAX_OUTPUT) return text;
  return `${text.slice(0, MAX_OUTPUT)}\n[${text.length - MAX_OUTPUT} characters left out]`;
}
