// SPDX-License-Identifier: Apache-2.0
// What goes wrong between a client and the server. Knows nothing of sessions.

/** The server refused: `{error: {type, code, message, param, ...}}`. */
export class ApiError extends Error {
  /** HTTP status. */
  readonly status: number;
  /** Stable code, such as `turn_in_progress`. */
  readonly code: string;
  /** The field at fault, if one is. */
  readonly param: string | null;
  /** The whole error object; some codes add fields of their own. */
  readonly details: Record<string, unknown>;

  constructor(status: number, details: Record<string, unknown>) {
    super(String(details["message"] ?? `HTTP ${status}`));
    this.name = "ApiError";
    this.status = status;
    this.code = String(details["code"] ?? "unknown");
    this.param = typeof details["param"] === "string" ? details["param"] : null;
    this.details = details;
  }
}

/** The connection broke, and the server did not come back in time. */
export class ConnectionError extends Error {
  constructor(message: string, cause?: unknown) {
    super(message, { cause });
    this.name = "ConnectionError";
  }
}

/** Read the error object of a refusal; a body that is none still gives an ApiError. */
export async function refusalOf(response: Response): Promise<ApiError> {
  const text = await response.text();
  try {
    const body = JSON.parse(text) as { error?: Record<string, unknown> };
    if (body.error) return new ApiError(response.status, body.error);
  } catch {
    // A proxy's page: its text is all there is to say.
  }
  return new ApiError(response.status, { message: text.slice(0, 500) });
}
