# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m engine.process --config-json PATH` (or `-` for stdin).

Exit codes: 0 stopped when asked to, 1 the configuration or the model is wrong (one line on stderr
says what), 2 usage, 3 the engine broke. SIGTERM and SIGINT drain; a second one stops at once.
Ready means: it answers on its socket. Does not know: what steps do, the appliance.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from engine.config import EngineConfig, from_json
from engine.errors import EngineError
from engine.loop.heart import Keeper
from engine.transport import EngineSocket

if TYPE_CHECKING:
    from engine.loop.server import EngineServer

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_BROKEN = 3

# The loop's thread works beside an eager forward pass; the default of 5 ms would let either hold
# the interpreter for half a decode step.
SWITCH_INTERVAL_S = 0.0005


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine until it is told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.process", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="PATH_OR_-")
    parser.add_argument("--l2-fd", type=int, metavar="FD", help="shared memory to keep L2 in")
    parser.add_argument("--heartbeat-fd", type=int, metavar="FD", help="eventfd for signs of life")
    parser.add_argument("--log-level", default="INFO", metavar="LEVEL")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=arguments.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        config = from_json(_read(arguments.config_json))
        keeper = Keeper(l2_fd=arguments.l2_fd, heartbeat_fd=arguments.heartbeat_fd)
        return run_engine(config, keeper)
    except (EngineError, ValueError, OSError) as error:
        print(f"moorage engine: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED


def run_engine(config: EngineConfig, keeper: Keeper | None = None) -> int:
    """Build everything, serve until a signal, and return the exit code.

    Args:
        keeper: what a process that outlives this one keeps for it; None: nobody does.

    Raises: EngineError, ValueError, OSError where it cannot start.
    """
    set_thread_environment(config)
    server = _build(config, keeper or Keeper())
    # What the start has made stays: no later collection of garbage has to walk over it.
    gc.collect()
    gc.freeze()
    _stop_on_signals(server, config.drain_s)
    logger.info("engine ready: socket=%s instance=%s", config.socket_path, server.instance_id)
    try:
        server.run()
    except Exception:
        logger.exception("the engine broke")
        return EXIT_BROKEN
    logger.info("engine stopped: instance=%s", server.instance_id)
    return EXIT_OK


def set_thread_environment(config: EngineConfig) -> None:
    """Bound the thread pools of native libraries; they read this once, when they are loaded."""
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    # Idle OpenMP threads would spin on the cores that the decoder's own threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _build(config: EngineConfig, keeper: Keeper) -> EngineServer:
    # First of all, since it costs nothing: what is said meanwhile waits in the socket.
    socket = EngineSocket(config.socket_path)
    try:
        return _build_behind(socket, config, keeper)
    except BaseException:
        socket.close(linger_ms=0)
        raise


def _build_behind(socket: EngineSocket, config: EngineConfig, keeper: Keeper) -> EngineServer:
    from engine.grammar.compiler import GrammarCompiler
    from engine.text.assets import load_text_assets

    # Torch comes with these; the environment is in place by now.
    from engine.execution.model_runner import build_model_runner  # isort: skip
    from engine.loop.server import EngineServer, Vocabulary, WakeSignal  # isort: skip

    assets = load_text_assets(config.model, load_format=config.load_format)
    wake = WakeSignal()
    # Importing xgrammar takes seconds; the weights load meanwhile.
    compiler = GrammarCompiler(
        assets.token_bytes,
        assets.eos_ids,
        assets.vocab_size,
        config.grammar,
        wake.set,
        control_ids=assets.control_token_ids,
    )
    runner = build_model_runner(config)
    compiler.wait_warm()
    vocabulary = Vocabulary(
        token_bytes=assets.token_bytes,
        eos_ids=assets.eos_ids,
        control_ids=assets.control_token_ids,
    )
    return EngineServer(config, runner, compiler, vocabulary, socket, wake, keeper=keeper)


def _stop_on_signals(server: EngineServer, drain_s: float) -> None:
    num_signals = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        server.stop(drain_s if num_signals == 1 else 0.0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _read(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def exit_now(code: int) -> NoReturn:
    """End the process as it is: a grammar that still compiles would be waited for otherwise."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
