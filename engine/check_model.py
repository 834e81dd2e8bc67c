# SPDX-License-Identifier: Apache-2.0
"""Whether an engine could load its model: `python -m engine.check_model --config-json PATH_OR_-`.

Looks at what the engine process would: the settings against the model and this machine, every
tensor's name, shape and dtype, the tokenizer, the chat template. Reads no tensor. What is wrong is
one line on stdout. Exit codes: 0 nothing is, 1 something, 2 usage. Does not know: the appliance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig, from_json
from engine.errors import EngineError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.check_model", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="PATH_OR_-")
    path = parser.parse_args(argv).config_json
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        check_engine_model(from_json(text))
    except (EngineError, ValueError, OSError) as error:
        print(str(error), flush=True)
        return 1
    return 0


def check_engine_model(config: EngineConfig) -> None:
    """Raises: EngineError, ValueError or OSError, as the start of an engine would."""
    from engine.execution.model_loading import check_model
    from engine.text.assets import load_text_assets

    load_text_assets(config.model, load_format=config.load_format)
    check_model(config)


if __name__ == "__main__":
    sys.exit(main())
