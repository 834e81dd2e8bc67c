# SPDX-License-Identifier: Apache-2.0
"""Loads Mooncake's library, and tries a set-up out in a process of its own.

A set-up holds the interpreter lock until the owner answers, 30 s where the owner hangs (0.3.13,
measured): this whole process would stand still. So `check_answers` lets another process stand still
first: `python -m kvtiers.mooncake_library ADDRESS` ends with 0 where the owner answers.

Does not know: pages, connections that are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

from kvtiers.mooncake_endpoints import check_listening

TRIAL_S = 8.0
_TRIAL_BYTES = 1 << 20
# Read by the library when it is loaded or set up; what the operator set is kept.
_LIBRARY_ENV = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
}
_NEEDED = (
    "setup_dummy",
    "alloc_from_mem_pool",
    "register_buffer",
    "batch_put_from",
    "batch_get_into",
    "batch_is_exist",
    "batch_remove",
    "close",
)
_GLOG_LEVEL_SYMBOL = "_ZN3fLI17FLAGS_minloglevelE"
_GLOG_FATAL = 3


def load_library() -> type[Any]:
    """The store class of the library. Raises OSError, saying what is missing."""
    for name, value in _LIBRARY_ENV.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store as library
    except ImportError as error:
        hint = (
            "the wheel needs libibverbs1"
            if "lib" in str(error)
            else "pip install moorage[mooncake]"
        )
        raise OSError(f"mooncake cannot be loaded: {error} (hint: {hint})") from None
    store: type[Any] | None = getattr(library, "MooncakeDistributedStore", None)
    lacking = [name for name in _NEEDED if not hasattr(store, name)]
    if store is None or lacking:
        what = ", ".join(lacking)
        raise OSError(f"this build of mooncake has no {what} (hint: pip install moorage[mooncake])")
    _silence(str(library.__file__))
    return store


def check_answers(address: str, timeout_s: float = TRIAL_S) -> None:
    """Raises OSError, naming the address, where a set-up with the owner there would not work.

    Takes 0.1 s where it would, now and then a second; else `timeout_s` at most.
    """
    check_listening(address)
    command = [sys.executable, "-m", "kvtiers.mooncake_library", address]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{address}: takes a connection and answers nothing") from None
    if done.returncode != 0:
        raise OSError(f"{address}: a trial of its set-up ended with {done.returncode}")


def _silence(path: str) -> None:
    """An owner that is away would be worth a line on stderr for every key of every call."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(path), _GLOG_LEVEL_SYMBOL)
    except (OSError, ValueError):
        return  # another build: noisy, and right
    level.value = _GLOG_FATAL


def _try_set_up(address: str) -> None:
    """Ends this process."""
    with contextlib.suppress(ValueError):
        signal.alarm(int(TRIAL_S) + 5)  # where nobody is left to end it
    code = load_library()().setup_dummy(_TRIAL_BYTES, _TRIAL_BYTES, address)
    os._exit(0 if code == 0 else 1)  # a close takes seconds; the owner lets go of it by itself


if __name__ == "__main__":
    _try_set_up(sys.argv[1])
