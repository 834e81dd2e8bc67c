// SPDX-License-Identifier: Apache-2.0
// Requests over fetch: authorization, refusals, retries while the server restarts.

import { ApiError, ConnectionError, refusalOf } from "./errors.js";

export interface HttpOptions {
  /** Where the server is, such as `http://127.0.0.1:8000`; with `/v1` behind it, too. */
  baseUrl: string;
  /** Sent as a bearer token. */
  apiKey?: string;
  /** How long a server may be away before a call gives up; milliseconds. Default 60,000. */
  patienceMs?: number;
  /** A silent stream counts as broken after this; heartbeats come every 5 s. Default 20,000. */
  silenceMs?: number;
  fetch?: typeof fetch;
}

export interface Call {
  method: "GET" | "POST" | "DELETE";
  path: string;
  query?: Record<string, string | number | boolean | null | undefined>;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
  /** Whether the call may be sent again: it reads, or carries a key that tells repeats. */
  isRepeatable?: boolean;
}

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;
/** What a proxy, or a server that is starting, says. */
const AWAY = new Set([502, 503, 504]);

export class Http {
  readonly silenceMs: number;
  readonly #options: HttpOptions;
  readonly #base: string;
  readonly #patienceMs: number;
  readonly #fetch: typeof fetch;

  constructor(options: HttpOptions) {
    this.#options = options;
    this.#base = options.baseUrl.replace(/\/+$/, "").replace(/\/v1$/, "").replace(/\/+$/, "");
    this.#patienceMs = options.patienceMs ?? 60_000;
    this.silenceMs = options.silenceMs ?? 20_000;
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** The answer's JSON. Throws ApiError, ConnectionError. */
  async json<T>(call: Call): Promise<T> {
    const response = await this.open(call);
    return (await response.json()) as T;
  }

  /** The answer, not yet read; refusals are thrown. Throws ApiError, ConnectionError. */
  async open(call: Call): Promise<Response> {
    const patience = new Patience(this.#patienceMs);
    for (;;) {
      let failure: unknown;
      try {
        const response = await this.#send(call);
        if (response.ok) return response;
        failure = await refusalOf(response);
      } catch (error) {
        if (call.signal?.aborted) throw error;
        failure = error;
      }
      const isAway = !(failure instanceof ApiError) || AWAY.has(failure.status);
      const mayRepeat = call.isRepeatable ?? call.method === "GET";
      if (!isAway || !mayRepeat || !(await patience.pause(call.signal))) {
        if (failure instanceof ApiError) throw failure;
        throw new ConnectionError(`${this.#base}: ${reasonOf(failure)}`, failure);
      }
    }
  }

  #send(call: Call): Promise<Response> {
    const url = new URL(this.#base + call.path);
    for (const [name, value] of Object.entries(call.query ?? {})) {
      if (value !== undefined && value !== null) url.searchParams.set(name, String(value));
    }
    const headers: Record<string, string> = { ...call.headers };
    if (this.#options.apiKey) headers["authorization"] = `Bearer ${this.#options.apiKey}`;
    const init: RequestInit = { method: call.method, headers };
    if (call.body !== undefined) {
      headers["content-type"] = "application/json";
      init.body = JSON.stringify(call.body);
    }
    if (call.signal) init.signal = call.signal;
    return this.#fetch(url, init);
  }

  /** A fresh count of how long a server may be away. */
  patience(): Patience {
    return new Patience(this.#patienceMs);
  }
}

/** What fetch hides in `cause`: "fetch failed" alone tells nobody anything. */
function reasonOf(failure: unknown): string {
  const cause = failure instanceof Error ? failure.cause : undefined;
  if (!(cause instanceof Error)) return String(failure);
  return `${String(failure)} (${cause.message || String((cause as { code?: unknown }).code)})`;
}

/** Growing pauses between attempts, until the time is over. */
export class Patience {
  readonly #ms: number;
  #until: number;
  #pauseMs = FIRST_PAUSE_MS;

  constructor(ms: number) {
    this.#ms = ms;
    this.#until = Date.now() + ms;
  }

  /** Something came: begin anew. */
  renew(): void {
    this.#until = Date.now() + this.#ms;
    this.#pauseMs = FIRST_PAUSE_MS;
  }

  /** Wait a little; false where the time is over. */
  async pause(signal?: AbortSignal): Promise<boolean> {
    if (Date.now() + this.#pauseMs > this.#until || signal?.aborted) return false;
    await new Promise((resolve) => setTimeout(resolve, this.#pauseMs));
    this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS);
    return !signal?.aborted;
  }
}
