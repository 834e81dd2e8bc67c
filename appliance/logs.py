# SPDX-License-Identifier: Apache-2.0
"""Logging of the appliance's processes: one dictConfig, to stderr, set once per process.

Does not know: what is logged.
"""

from __future__ import annotations

import logging
import logging.config
from typing import Any

KEYS = ("session_id", "turn_id", "request_id", "rank")


class KeyFormatter(logging.Formatter):
    """Appends the keys given by `extra=` as key=value, so that one grep follows a session."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        keys = [f"{key}={getattr(record, key)}" for key in KEYS if hasattr(record, key)]
        return " ".join([line, *keys])


def dict_config(process: str, level: str) -> dict[str, Any]:
    """Return the dictConfig for one process (`supervisor`, `api`, `engine`)."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "()": "appliance.logs.KeyFormatter",
                "format": f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s",
            }
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "stream": "ext://sys.stderr",
            }
        },
        "root": {"level": level, "handlers": ["stderr"]},
        # One access line per request would be a log line per step of an agent: metrics count them.
        "loggers": {
            "uvicorn.access": {"level": "WARNING"},
            # What fails in a request or at the start is logged where it is answered.
            "uvicorn.error": {"level": "CRITICAL" if level != "DEBUG" else "DEBUG"},
            "sse_starlette": {"level": "WARNING"},
            "asyncio": {"level": "WARNING"},
        },
    }


def configure(process: str, level: str) -> None:
    """Set up logging of this process."""
    logging.config.dictConfig(dict_config(process, level))
