// SPDX-License-Identifier: Apache-2.0
export { Moorage, type SessionQuery, type TurnOptions } from "./client.js";
export { ApiError, ConnectionError } from "./errors.js";
export type { HttpOptions } from "./http.js";
export { eventsOf, SseParser, type ServerSentEvent } from "./sse.js";
export { isTerminal, TurnStream, type TerminalEvent } from "./turn_stream.js";
export type * from "./schema.js";
