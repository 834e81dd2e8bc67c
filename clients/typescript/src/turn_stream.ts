// SPDX-License-Identifier: Apache-2.0
// A turn's events, each exactly once, across broken connections and restarts of the server.

import { ApiError, ConnectionError } from "./errors.js";
import type { Call, Http } from "./http.js";
import type { Turn, TurnCancelled, TurnCompleted, TurnEvent, TurnFailed, TurnIncomplete } from "./schema.js";
import { eventsOf } from "./sse.js";

export type TerminalEvent = TurnCompleted | TurnIncomplete | TurnCancelled | TurnFailed;

const TERMINAL = new Set(["turn.completed", "turn.incomplete", "turn.cancelled", "turn.failed"]);

export function isTerminal(event: TurnEvent): event is TerminalEvent {
  return TERMINAL.has(event.type);
}

/** Iterate it once; `finalTurn()` reads what is left and gives the turn as it ended. */
export class TurnStream implements AsyncIterable<TurnEvent> {
  readonly #http: Http;
  readonly #sessionPath: string;
  readonly #first: Call;
  readonly #signal: AbortSignal | undefined;
  #turnId: string | null;
  #sequence: number;
  #terminal: TerminalEvent | null = null;
  #events: AsyncGenerator<TurnEvent> | null = null;

  /** `first` opens the stream: a new turn, or the events of one that is there. */
  constructor(
    http: Http,
    sessionPath: string,
    first: Call,
    options: { turnId?: string; startingAfter?: number; signal?: AbortSignal | undefined } = {},
  ) {
    this.#http = http;
    this.#sessionPath = sessionPath;
    this.#first = first;
    this.#turnId = options.turnId ?? null;
    this.#sequence = options.startingAfter ?? 0;
    this.#signal = options.signal;
  }

  /** The turn's id, once its first event has come. */
  get turnId(): string | null {
    return this.#turnId;
  }

  /** Number of the last event that came: what a later reader continues after. */
  get lastSequence(): number {
    return this.#sequence;
  }

  [Symbol.asyncIterator](): AsyncGenerator<TurnEvent> {
    this.#events ??= this.#read();
    return this.#events;
  }

  /** Read to the end. Throws ApiError, ConnectionError; a failed turn is returned, not thrown. */
  async finalTurn(): Promise<Turn> {
    for await (const event of this) void event;
    if (this.#terminal === null) throw new ConnectionError("the stream was not read to its end");
    return this.#terminal.turn;
  }

  /** Text of the answer as it comes. */
  async *text(): AsyncGenerator<string> {
    for await (const event of this) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  }

  /** Stop the turn; the stream still ends with its terminal event. */
  async cancel(): Promise<Turn> {
    if (this.#turnId === null) throw new ConnectionError("the turn has not begun");
    const path = `${this.#sessionPath}/turns/${this.#turnId}/cancel`;
    return this.#http.json<Turn>({ method: "POST", path, body: {}, isRepeatable: true });
  }

  async *#read(): AsyncGenerator<TurnEvent> {
    const patience = this.#http.patience();
    for (;;) {
      let failure: unknown = "the stream ended before the turn did";
      try {
        for await (const event of this.#attempt()) {
          patience.renew();
          yield event;
          if (isTerminal(event)) return;
        }
      } catch (error) {
        if (error instanceof ApiError || this.#signal?.aborted) throw error;
        failure = error;
      }
      if (!(await patience.pause(this.#signal))) {
        this.#signal?.throwIfAborted();
        throw new ConnectionError(String(failure), failure);
      }
    }
  }

  /** One connection's events that are new. */
  async *#attempt(): AsyncGenerator<TurnEvent> {
    const silence = new AbortController();
    const abort = (): void => silence.abort();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const onBytes = (): void => {
      clearTimeout(timer);
      timer = setTimeout(abort, this.#http.silenceMs);
    };
    this.#signal?.addEventListener("abort", abort, { once: true });
    try {
      const response = await this.#http.open({ ...this.#call(), signal: silence.signal });
      if (response.body === null) return;
      onBytes();
      for await (const { event: name, data } of eventsOf(response.body, onBytes)) {
        if (name === "stream.reconnect") continue; // the server stops: the stream goes on elsewhere
        const event = JSON.parse(data) as TurnEvent;
        if (event.sequence_number <= this.#sequence) continue;
        this.#sequence = event.sequence_number;
        this.#turnId = event.turn_id;
        if (isTerminal(event)) this.#terminal = event;
        yield event;
      }
    } finally {
      clearTimeout(timer);
      this.#signal?.removeEventListener("abort", abort);
      silence.abort();
    }
  }

  #call(): Call {
    if (this.#turnId === null) return this.#first;
    return {
      method: "GET",
      path: `${this.#sessionPath}/turns/${this.#turnId}/events`,
      query: { starting_after: this.#sequence },
    };
  }
}
