// SPDX-License-Identifier: Apache-2.0
// The session API, a method an endpoint. Types come from the server's OpenAPI document.

import { Http, type HttpOptions } from "./http.js";
import type {
  CacheView,
  CompactCreate,
  Compacted,
  ForkAnswer,
  ForkCreate,
  ItemPage,
  ItemsAppend,
  ItemsAppended,
  Lease,
  LeaseCreate,
  LeaseDeleted,
  LeaseList,
  Resumed,
  RolledBack,
  Session,
  SessionCreate,
  SessionDeleted,
  SessionPage,
  SessionTokens,
  SessionUpdate,
  SessionUpdated,
  Signal,
  SignalCreate,
  Suspended,
  Turn,
  TurnCreate,
  TurnPage,
} from "./schema.js";
import { TurnStream } from "./turn_stream.js";

export interface TurnOptions {
  /** Tells a repeat from a new turn; made up where absent. */
  idempotencyKey?: string;
  signal?: AbortSignal;
}

export interface SessionQuery {
  after?: string;
  limit?: number;
  status?: string;
  parent_session_id?: string;
  order?: "asc" | "desc";
  metadata?: Record<string, string>;
}

export class Moorage {
  readonly #http: Http;

  constructor(options: HttpOptions) {
    this.#http = new Http(options);
  }

  createSession(body: SessionCreate): Promise<Session> {
    return this.#post("/v1/sessions", body);
  }

  listSessions({ metadata, ...query }: SessionQuery = {}): Promise<SessionPage> {
    const narrowed = Object.entries(metadata ?? {}).map(([key, value]) => [`metadata[${key}]`, value]);
    return this.#get("/v1/sessions", { ...query, ...Object.fromEntries(narrowed) });
  }

  getSession(sessionId: string): Promise<Session> {
    return this.#get(sessionPath(sessionId));
  }

  updateSession(sessionId: string, body: SessionUpdate): Promise<SessionUpdated> {
    return this.#post(sessionPath(sessionId), body);
  }

  /** `release` lets its KV go now, `decay` leaves it to eviction. */
  closeSession(sessionId: string, cache: "release" | "decay" = "release"): Promise<SessionDeleted> {
    return this.#http.json({
      method: "DELETE",
      path: sessionPath(sessionId),
      query: { cache },
      isRepeatable: true,
    });
  }

  /** Run a turn and wait for its end; asked again under the same key where the server restarts. */
  async runTurn(sessionId: string, body: TurnCreate, options: TurnOptions = {}): Promise<Turn> {
    return this.#http.json(turnCall(sessionId, { ...body, stream: false }, options));
  }

  /** Run a turn and read its events. Nothing is sent before the stream is read. */
  streamTurn(sessionId: string, body: TurnCreate, options: TurnOptions = {}): TurnStream {
    const call = turnCall(sessionId, { ...body, stream: true }, options);
    return new TurnStream(this.#http, sessionPath(sessionId), call, { signal: options.signal });
  }

  /** The events of a turn that is there, from any of them on. */
  followTurn(
    sessionId: string,
    turnId: string,
    startingAfter = 0,
    signal?: AbortSignal,
  ): TurnStream {
    const path = `${sessionPath(sessionId)}/turns/${encodeURIComponent(turnId)}/events`;
    const call = { method: "GET", path, query: { starting_after: startingAfter } } as const;
    return new TurnStream(this.#http, sessionPath(sessionId), call, {
      turnId,
      startingAfter,
      signal,
    });
  }

  getTurn(sessionId: string, turnId: string): Promise<Turn> {
    return this.#get(`${sessionPath(sessionId)}/turns/${encodeURIComponent(turnId)}`);
  }

  listTurns(sessionId: string): Promise<TurnPage> {
    return this.#get(`${sessionPath(sessionId)}/turns`);
  }

  cancelTurn(sessionId: string, turnId: string): Promise<Turn> {
    const path = `${sessionPath(sessionId)}/turns/${encodeURIComponent(turnId)}/cancel`;
    return this.#http.json({ method: "POST", path, body: {}, isRepeatable: true });
  }

  appendItems(sessionId: string, body: ItemsAppend): Promise<ItemsAppended> {
    return this.#post(`${sessionPath(sessionId)}/items`, body);
  }

  listItems(
    sessionId: string,
    query: { after?: string; limit?: number; order?: "asc" | "desc" } = {},
  ): Promise<ItemPage> {
    return this.#get(`${sessionPath(sessionId)}/items`, query);
  }

  tokens(sessionId: string): Promise<SessionTokens> {
    return this.#get(`${sessionPath(sessionId)}/tokens`);
  }

  fork(sessionId: string, body: ForkCreate = {}): Promise<ForkAnswer> {
    return this.#post(`${sessionPath(sessionId)}/fork`, body);
  }

  /** Go back to just behind a turn, an item or a revision. */
  rollback(sessionId: string, to: string | number, expectRevision?: number): Promise<RolledBack> {
    const expected = expectRevision === undefined ? {} : { expect_revision: expectRevision };
    return this.#post(`${sessionPath(sessionId)}/rollback`, { to, ...expected });
  }

  /** Put a summary, or items, in place of the older part of the history. */
  compact(sessionId: string, body: CompactCreate): Promise<Compacted> {
    return this.#post(`${sessionPath(sessionId)}/compact`, body);
  }

  /** Flush the session's KV to the lowest tier and let go of what lies above. */
  suspend(sessionId: string): Promise<Suspended> {
    return this.#post(`${sessionPath(sessionId)}/suspend`, {}, true);
  }

  /** Bring the session's KV back to L1. */
  resume(sessionId: string): Promise<Resumed> {
    return this.#post(`${sessionPath(sessionId)}/resume`, {}, true);
  }

  lease(sessionId: string, body: LeaseCreate): Promise<Lease> {
    return this.#post(`${sessionPath(sessionId)}/leases`, body);
  }

  listLeases(sessionId: string): Promise<LeaseList> {
    return this.#get(`${sessionPath(sessionId)}/leases`);
  }

  releaseLease(sessionId: string, leaseId: string): Promise<LeaseDeleted> {
    const path = `${sessionPath(sessionId)}/leases/${encodeURIComponent(leaseId)}`;
    return this.#http.json({ method: "DELETE", path, isRepeatable: true });
  }

  signal(sessionId: string, body: SignalCreate): Promise<Signal> {
    return this.#post(`${sessionPath(sessionId)}/signals`, body, true);
  }

  cache(sessionId: string): Promise<CacheView> {
    return this.#get(`${sessionPath(sessionId)}/cache`);
  }

  #get<T>(path: string, query: Record<string, string | number | undefined> = {}): Promise<T> {
    return this.#http.json<T>({ method: "GET", path, query });
  }

  #post<T>(path: string, body: unknown, isRepeatable = false): Promise<T> {
    return this.#http.json<T>({ method: "POST", path, body, isRepeatable });
  }
}

function sessionPath(sessionId: string): string {
  return `/v1/sessions/${encodeURIComponent(sessionId)}`;
}

function turnCall(sessionId: string, body: TurnCreate, options: TurnOptions) {
  const key = options.idempotencyKey ?? globalThis.crypto.randomUUID();
  return {
    method: "POST" as const,
    path: `${sessionPath(sessionId)}/turns`,
    body,
    headers: { "idempotency-key": key },
    signal: options.signal,
    isRepeatable: true,
  };
}
