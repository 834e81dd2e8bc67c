// SPDX-License-Identifier: Apache-2.0
// VS Code's side: a view, its messages, settings. What the agent does is in agent.ts and tools.ts.

import { Moorage } from "@moorage/client";
import * as vscode from "vscode";

import { Agent, type Sink, type Storage } from "./agent.js";
import { panelHtml, type FromPanel, type ToPanel } from "./panel.js";
import { ToolBox } from "./tools.js";

export function activate(context: vscode.ExtensionContext): void {
  const panel = new Panel(context);
  context.subscriptions.push(
    vscode.window.registerWebviewViewProvider("moorage.panel", panel),
    vscode.commands.registerCommand("moorage.newSession", () => panel.reset()),
    vscode.commands.registerCommand("moorage.stop", () => panel.stop()),
  );
}

class Panel implements vscode.WebviewViewProvider {
  readonly #context: vscode.ExtensionContext;
  #view: vscode.WebviewView | null = null;
  #agent: Agent | null = null;

  constructor(context: vscode.ExtensionContext) {
    this.#context = context;
  }

  resolveWebviewView(view: vscode.WebviewView): void {
    this.#view = view;
    view.webview.options = { enableScripts: true, localResourceRoots: [] };
    view.webview.html = panelHtml(view.webview.cspSource);
    view.webview.onDidReceiveMessage((message: FromPanel) => {
      if (message.type === "ask") void this.#ask(message.text);
      else if (message.type === "stop") void this.stop();
      else void this.reset();
    });
  }

  async stop(): Promise<void> {
    await this.#agent?.stop();
  }

  async reset(): Promise<void> {
    await this.#agentOrNew()?.reset();
    this.#agent = null;
    this.#post({ type: "cleared" });
  }

  async #ask(text: string): Promise<void> {
    const agent = this.#agentOrNew();
    if (agent === null) {
      this.#post({ type: "error", text: "Open a folder first." });
      return;
    }
    const sink: Sink = {
      text: (delta) => this.#post({ type: "text", text: delta }),
      reasoning: (delta) => this.#post({ type: "reasoning", text: delta }),
      toolStarted: (call) => this.#post({ type: "tool", text: `${call.name} ${call.arguments}` }),
      toolEnded: (call, output) => this.#post({ type: "output", text: output }),
      turnEnded: (summary) => this.#post({ type: "ended", summary }),
    };
    try {
      await agent.ask(text, sink);
    } catch (error) {
      this.#post({ type: "error", text: String(error) });
    } finally {
      this.#post({ type: "idle" });
    }
  }

  #agentOrNew(): Agent | null {
    const folder = vscode.workspace.workspaceFolders?.[0];
    if (this.#agent !== null || folder === undefined) return this.#agent;
    const settings = vscode.workspace.getConfiguration("moorage");
    const apiKey = settings.get<string>("apiKey", "");
    const memento = this.#context.workspaceState;
    const storage: Storage = {
      get: (key) => memento.get<string>(key),
      set: (key, value) => memento.update(key, value),
    };
    const confirm = async (what: string): Promise<boolean> => {
      if (!settings.get<boolean>("confirmCommands", true)) return true;
      const answer = await vscode.window.showWarningMessage(`The agent wants to ${what}`, { modal: true }, "Allow");
      return answer === "Allow";
    };
    this.#agent = new Agent({
      client: new Moorage({
        baseUrl: settings.get<string>("url", "http://127.0.0.1:8000"),
        ...(apiKey ? { apiKey } : {}),
      }),
      model: settings.get<string>("model", "default"),
      storage,
      tools: new ToolBox(folder.uri.fsPath, confirm),
      workspace: folder.name,
    });
    return this.#agent;
  }

  #post(message: ToPanel): void {
    void this.#view?.webview.postMessage(message);
  }
}
