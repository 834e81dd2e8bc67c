// SPDX-License-Identifier: Apache-2.0
// The agent of one workspace: it holds one Moorage session, streams turns, runs the tools they
// call, and goes on after restarts of the editor or the server. Knows nothing of VS Code.

import {
  ApiError,
  type FunctionCallItem,
  type InputItem,
  type Miss,
  Moorage,
  type Session,
  type TierTokens,
  type TurnCreate,
  type TurnStream,
} from "@moorage/client";

import type { ToolBox } from "./tools.js";

/** Where the session's id outlives the editor, such as a workspace's memento. */
export interface Storage {
  get(key: string): string | undefined;
  set(key: string, value: string | undefined): PromiseLike<void>;
}

/** What the panel shows. */
export interface Sink {
  text(delta: string): void;
  reasoning(delta: string): void;
  toolStarted(call: FunctionCallItem): void;
  toolEnded(call: FunctionCallItem, output: string, isFailed: boolean): void;
  turnEnded(summary: TurnSummary): void;
}

export interface TurnSummary {
  status: string;
  reason: string | null;
  inputTokens: number;
  cachedTokens: number;
  outputTokens: number;
  tiers: TierTokens;
  miss: Miss | null;
}

export interface AgentOptions {
  client: Moorage;
  model: string;
  storage: Storage;
  tools: ToolBox;
  /** Tells the session apart in `moorage sessions ls`. */
  workspace: string;
  instructions?: string;
  /** Turns that one question may take. */
  maxTurns?: number;
  /** Settings of every turn, such as `max_output_tokens`. */
  turn?: TurnCreate;
}

const SESSION_KEY = "moorage.session";
const INSTRUCTIONS =
  "You are a coding agent in the user's editor. Use the tools to read, change and run the " +
  "workspace's code; answer briefly.";
/** The session is gone for good: another one must be started. */
const GONE = new Set(["session_not_found", "session_expired"]);

export class Agent {
  readonly #options: AgentOptions;
  #session: Session | null = null;
  #running: TurnStream | null = null;
  #isStopped = false;

  constructor(options: AgentOptions) {
    this.#options = options;
  }

  /** The session's id, once there is one. */
  get sessionId(): string | undefined {
    return this.#session?.id ?? this.#options.storage.get(SESSION_KEY);
  }

  /**
   * Ask, and run turns and tools until the model has answered.
   *
   * `turn` are settings of the first turn alone (such as `tool_choice`). Throws ApiError,
   * ConnectionError; the session stays usable.
   */
  async ask(question: string, sink: Sink, turn: TurnCreate = {}): Promise<void> {
    this.#isStopped = false;
    let input: InputItem[] = [{ type: "message", role: "user", content: question }];
    for (let count = 0; count < (this.#options.maxTurns ?? 25) && !this.#isStopped; count++) {
      const settings = { ...this.#options.turn, ...(count === 0 ? turn : {}) };
      const calls = await this.#turn({ ...settings, input, auto_close_calls: true }, sink);
      if (calls.length === 0) return;
      input = [];
      for (const call of calls) input.push(await this.#runTool(call, sink));
    }
  }

  /** Stop the running turn; what it said so far stays in the history. */
  async stop(): Promise<void> {
    this.#isStopped = true;
    if (this.#running?.turnId) await this.#running.cancel();
  }

  /** Close the session; the next question starts another. */
  async reset(): Promise<void> {
    const id = this.sessionId;
    this.#session = null;
    await this.#options.storage.set(SESSION_KEY, undefined);
    if (id !== undefined) {
      await this.#options.client.closeSession(id).catch((error: unknown) => {
        if (!(error instanceof ApiError && GONE.has(error.code))) throw error;
      });
    }
  }

  /** One turn; the calls it wants run. A session that is gone is replaced, once. */
  async #turn(body: TurnCreate, sink: Sink): Promise<FunctionCallItem[]> {
    try {
      return await this.#stream(await this.#open(), body, sink);
    } catch (error) {
      if (!(error instanceof ApiError && GONE.has(error.code))) throw error;
      this.#session = null;
      await this.#options.storage.set(SESSION_KEY, undefined);
      return this.#stream(await this.#open(), body, sink);
    }
  }

  async #stream(session: Session, body: TurnCreate, sink: Sink): Promise<FunctionCallItem[]> {
    const stream = this.#options.client.streamTurn(session.id, { parallel_tool_calls: true, ...body });
    this.#running = stream;
    try {
      for await (const event of stream) {
        if (event.type === "response.output_text.delta") sink.text(event.delta);
        else if (event.type === "response.reasoning_text.delta") sink.reasoning(event.delta);
      }
      const turn = await stream.finalTurn();
      if (turn.status === "failed") {
        throw new ApiError(500, { ...(turn.error ?? { message: "the turn failed" }) });
      }
      sink.turnEnded({
        status: turn.status,
        reason: turn.stop_reason ?? turn.reason ?? null,
        inputTokens: turn.usage?.input_tokens ?? 0,
        cachedTokens: turn.usage?.input_tokens_details?.cached_tokens ?? 0,
        outputTokens: turn.usage?.output_tokens ?? 0,
        tiers: turn.x_cache ?? {},
        miss: turn.cache?.miss ?? null,
      });
      return turn.output.filter((item) => item.type === "function_call");
    } finally {
      this.#running = null;
    }
  }

  async #runTool(call: FunctionCallItem, sink: Sink): Promise<InputItem> {
    sink.toolStarted(call);
    await this.#signal("tool.started", call);
    const { output, isFailed } = await this.#options.tools.run(call.name, call.arguments);
    await this.#signal("tool.returning", call);
    sink.toolEnded(call, output, isFailed);
    const status = isFailed ? "failed" : "completed";
    return { type: "function_call_output", call_id: call.call_id, output, status };
  }

  /** Hints help the cache and may be lost. */
  async #signal(type: "tool.started" | "tool.returning", call: FunctionCallItem): Promise<void> {
    const id = this.sessionId;
    if (id === undefined) return;
    const body = { type, call_id: call.call_id, tool_name: call.name };
    await this.#options.client.signal(id, body).catch(() => undefined);
  }

  /** The workspace's session: the one that is held, the stored one, or a new one. */
  async #open(): Promise<Session> {
    if (this.#session !== null) return this.#session;
    const { client, storage, model, tools, workspace, instructions } = this.#options;
    const stored = storage.get(SESSION_KEY);
    if (stored !== undefined) {
      this.#session = await client.getSession(stored);
      return this.#session;
    }
    this.#session = await client.createSession({
      model,
      instructions: instructions ?? INSTRUCTIONS,
      tools: tools.definitions(),
      metadata: { workspace },
      on_disconnect: "continue",
    });
    await storage.set(SESSION_KEY, this.#session.id);
    return this.#session;
  }
}
