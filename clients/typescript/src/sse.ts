// SPDX-License-Identifier: Apache-2.0
// Server-sent events out of bytes, as the WHATWG HTML standard (section 9.2.6) parses them.

/** One event as it was sent. */
export interface ServerSentEvent {
  id: string;
  event: string;
  data: string;
}

/** Takes bytes in pieces of any size; gives the events that are complete. */
export class SseParser {
  readonly #decoder = new TextDecoder("utf-8");
  #rest = "";
  #id = "";
  #event = "";
  #data: string[] = [];
  #isStart = true;

  /** Events that these bytes complete; an empty list for comments and halves. */
  push(bytes: Uint8Array): ServerSentEvent[] {
    let text = this.#rest + this.#decoder.decode(bytes, { stream: true });
    if (this.#isStart && text.length > 0) {
      if (text.startsWith("\uFEFF")) text = text.slice(1);
      this.#isStart = false;
    }
    const events: ServerSentEvent[] = [];
    let start = 0;
    for (;;) {
      const end = lineEnd(text, start);
      if (end === null) break;
      this.#line(text.slice(start, end.at), events);
      start = end.next;
    }
    this.#rest = text.slice(start);
    return events;
  }

  #line(line: string, events: ServerSentEvent[]): void {
    if (line === "") {
      if (this.#data.length > 0) {
        const event = this.#event || "message";
        events.push({ id: this.#id, event, data: this.#data.join("\n") });
      }
      this.#event = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment: the server's heartbeat
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#event = value;
    else if (field === "id" && !value.includes("\0")) this.#id = value;
  }
}

/** Where the line that begins at `start` ends, or null while that cannot be known. */
function lineEnd(text: string, start: number): { at: number; next: number } | null {
  for (let at = start; at < text.length; at++) {
    const char = text[at];
    if (char === "\n") return { at, next: at + 1 };
    if (char === "\r") {
      if (at + 1 === text.length) return null; // a \n may follow in the next piece
      return { at, next: text[at + 1] === "\n" ? at + 2 : at + 1 };
    }
  }
  return null;
}

/** The events of a response's body; ends when the body does. Comments count as bytes, too. */
export async function* eventsOf(
  body: ReadableStream<Uint8Array>,
  onBytes: () => void = () => undefined,
): AsyncGenerator<ServerSentEvent> {
  const parser = new SseParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      yield* parser.push(value);
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
