# SPDX-License-Identifier: Apache-2.0
"""A file that somebody asked for by a setting. A full disk ends the file, not the engine.

Does not know: what is written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes bytes, as a binary file does."""

    def write(self, data: bytes, /) -> object: ...


class LogFile:
    """Grows; what is not flushed yet may be lost with the process."""

    def __init__(self, setting: str, path: str, *, appends: bool) -> None:
        """Raises: ConfigError, which names the setting, if the file cannot be opened."""
        self._setting = setting
        try:
            self._file = Path(path).open("ab" if appends else "wb")  # noqa: SIM115 - see close
        except OSError as error:
            allowed = "a file that can be written"
            raise ConfigError(setting, path, allowed, str(error)) from error

    def write(self, data: bytes, /) -> None:
        """Add to it."""
        self._try(lambda: self._file.write(data))

    def flush(self) -> None:
        """Let others read what was written."""
        self._try(self._file.flush)

    def close(self) -> None:
        """No more comes."""
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        if self._file.closed:
            return
        try:
            act()
        except OSError as error:
            logger.warning("%s ends: %s: %s", self._setting, self._file.name, error)
            with contextlib.suppress(OSError):  # it tries to write what is left
                self._file.close()


def open_log_file(setting: str, path: str, *, appends: bool = False) -> LogFile | None:
    """The file of a setting; None where it names none. Raises: ConfigError."""
    return LogFile(setting, path, appends=appends) if path else None
