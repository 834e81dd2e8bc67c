# SPDX-License-Identifier: Apache-2.0
"""`moorage serve` with a scripted model: a directory for it, and the processes that serve it.

`python -m tests.fakes.scripted_model_serve A.B=VALUE...` runs the real supervisor; its engine is
the real one too (`... --config-json PATH`, as the supervisor calls it), with one more architecture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.weights.gguf import open_gguf
from engine.weights.source import resolve_model
from tests.fakes.hf_text import MARKUP, TEMPLATES
from tools_schema.formats.registry import get_format

ENGINE_MODULE = "tests.fakes.scripted_model_serve"
CONTEXT_LEN = 256 * 1024
DEFAULT_FAMILY = "hermes_like"
END_OF_TURN = "<|im_end|>"


def write_scripted_model(directory: Path, family: str = DEFAULT_FAMILY) -> Path:
    """SmolLM2's vocabulary, ChatML, a long context, and no weights.

    `family`: "hermes_like" has tools in its template; a tool format's name stands for a template
    that knows none, but gives that format away.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END_OF_TURN)
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": CONTEXT_LEN,
        "eos_token_id": end_id,
    }
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TURN}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(_template(family))
    return directory


def _template(family: str) -> str:
    if family == DEFAULT_FAMILY:
        return (TEMPLATES / f"{family}.jinja").read_text()
    given_away = " ".join(get_format(family).probes[0])
    return "{# " + given_away + " #}" + (TEMPLATES / "chatml.jinja").read_text()


def _tokenizer() -> Tokenizer:
    metadata = open_gguf(resolve_model("default").path).metadata
    spellings = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {text: token_id for token_id, text in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", END_OF_TURN])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP[DEFAULT_FAMILY]])
    return tokenizer


def main() -> int:
    if "--config-json" in sys.argv:
        from engine.models.registry import add_architecture
        from engine.process import main as engine_main
        from tests.fakes.scripted_model import ARCHITECTURE, SCRIPTED

        add_architecture(ARCHITECTURE, SCRIPTED)
        return engine_main()
    from appliance import logs
    from appliance.config import load_config
    from appliance.supervisor import Supervisor

    config = load_config(None, sys.argv[1:])
    logs.configure("supervisor", config.server.log_level)
    return Supervisor(config, engine_module=ENGINE_MODULE).run()


if __name__ == "__main__":
    sys.exit(main())
