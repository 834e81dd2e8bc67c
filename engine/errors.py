# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the engine room, one class per kind; codes are stable and snake_case.

Does not know: HTTP statuses (`appliance.errors` maps the codes), logging.

    EngineError                      engine_error
      ConfigError(ValueError)        invalid_config: a field of EngineConfig
      RequestError(ValueError)       invalid_request (or a finer code): a field of a request
      GrammarError(ValueError)       invalid_grammar | grammar_budget_exceeded
      EngineUnavailableError         engine_unavailable: nobody answers on the socket
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the room. `code` is stable; the text is for people."""

    code = "engine_error"


class ConfigError(EngineError, ValueError):
    """A configuration field is wrong: `field` is its dotted path from the engine's root."""

    code = "invalid_config"

    def __init__(self, field: str, value: object, allowed: str, hint: str = "") -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        text = f"{field} = {value!r}: allowed: {allowed}"
        super().__init__(f"{text} (hint: {hint})" if hint else text)


class RequestError(EngineError, ValueError):
    """A field of one request is wrong; that request fails and nothing else."""

    def __init__(
        self, field: str, value: object, allowed: str, *, code: str = "invalid_request"
    ) -> None:
        self.code = code
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r}: allowed: {allowed}")


class QueryRefusedError(EngineError, ValueError):
    """The engine cannot take a field of a question; the text names it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class GrammarError(EngineError, ValueError):
    """A grammar does not compile, or not within its budget."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class EngineUnavailableError(EngineError):
    """No engine answers on the socket."""

    code = "engine_unavailable"


def spelled(bound: float) -> str:
    """A bound as a message names it: to the last digit, as what is named is allowed."""
    return str(int(bound)) if bound == int(bound) else repr(bound)
