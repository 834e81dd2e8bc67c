# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: every setting of the engine process, typed, with its default and unit.

Does not know: torch, TOML, environment variables, the appliance's other sections. Values are
checked once by `validate()` and then passed down; nothing below reads them from anywhere else.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from engine.errors import ConfigError, spelled
from engine.weights.errors import ModelNotFoundError
from engine.weights.source import DEFAULT_MODEL, resolve_model

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "bf16", "fp8")
DEVICES = ("auto", "cpu", "cuda")
L3_KINDS = ("auto", "file", "mooncake", "none")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
OVERLAPS = ("auto", "on", "off")
WEIGHT_FORMATS = ("auto", "dequantized", "packed")
SPECULATIONS = ("none", "ngram", "mtp")
# Kernels of a decode step take up to 16 tokens; with more they round otherwise. Drafts ride along
# up to there, so that they never change which kernels a step takes.
TOKENS_WITH_DRAFTS = 16
# A GPU expands a cached prefix once a step: a 64K prompt takes 1.66 s in steps of 2048, 1.41 in
# 4096, 1.34 in 8192; its last step holds up running streams for 76, 136, 252 ms (H200, 2026-11;
# over one token and zeros: random ones take a fifth longer).
TOKEN_BUDGETS = {"cpu": 512, "cuda": 4096}
# Where nobody waits for it, a step of a GPU's default budget may be larger: experts have fuller
# tiles in it, too. First token of 64K, over HTTP: 1.66 s in steps of 4096, 1.54 in 8192, 1.48 in
# 16384; who comes meanwhile waits for 0.16, 0.29, 0.55 s at most.
LONE_TOKEN_BUDGETS = {"cpu": 512, "cuda": 16384}
# sockaddr_un.sun_path holds 108 bytes with its terminator (unix(7)).
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Compiling grammars, beside the loop."""

    compile_threads: int = 2
    """Worker threads that compile grammars; count."""
    budget_ms: int = 2000
    """How long a request waits for its grammar before it fails; milliseconds."""
    cache_bytes: int = 64 << 20
    """Compiled grammars kept, least recently used dropped first; bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the control plane may hold at once."""

    max_waiting: int = 1024
    """Requests queued or running; one more is refused with `queue_full`; count."""
    keep_outputs_s: float = 600.0
    """How long a finished request's output can still be attached to; seconds."""
    keep_outputs_bytes: int = 64 << 20
    """Outputs of finished requests kept for that; bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """Where KV pages go that the device has no room for, and what outlives a restart."""

    l2_bytes: int = -1
    """Host memory for KV pages (L2); -1: a quarter of what is free, bounded; 0: none; bytes."""
    l3: str = "auto"
    """auto (an appliance: file; an engine by itself: none) | file | mooncake | none."""
    l3_dir: str = ""
    """Directory of the file store; empty: `kv` in the appliance's state_dir."""
    l3_quota_bytes: int = 4 << 30
    """What the file store may take on disk, least valuable pages dropped first; bytes."""
    l3_wait_ms: int = 500
    """How long a request waits to hear what L3 has of its prompt; 0: not at all; milliseconds."""
    overlap_loads: str = "auto"
    """auto (on a GPU) | on | off: new tokens are computed while pages come, layer by layer."""
    mooncake_master: str = ""
    """host:port of a Mooncake master that others run; empty: a private one on this machine."""
    mooncake_metrics: str = ""
    """host:port of that master's metrics; empty: each engine keeps order among its own pages."""
    mooncake_protocol: str = "tcp"
    """tcp | rdma."""
    mooncake_device: str = ""
    """RDMA device names, comma-separated; empty: what Mooncake finds."""
    mooncake_segment_bytes: int = 1 << 30
    """Memory of the private Mooncake store; bytes."""
    mooncake_ssd_dir: str = ""
    """Directory of the private Mooncake store's disk tier; empty: memory alone."""
    mooncake_ssd_quota_bytes: int = 8 << 30
    """What that disk tier may take; bytes."""
    record_inputs: str = ""
    """File to log the control plane's inputs to, for a replay (it grows); empty: none."""


def default_run_dir() -> str:
    """A per-user directory for sockets."""
    return str(Path(tempfile.gettempdir()) / f"moorage-{os.getuid()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine process: model, memory, batch limits."""

    model: str = DEFAULT_MODEL
    """Hugging Face directory or GGUF file; `smollm2` is the packaged SmolLM2-135M-Instruct."""
    load_format: str = "auto"
    """auto | gguf | safetensors | dummy (random weights, for benchmarks)."""
    dtype: str = "auto"
    """Activations and KV: auto | float32 | bfloat16."""
    kv_dtype: str = "auto"
    """KV: auto (as `dtype`) | bf16 | fp8 (latent attention only; 1.75 times as many tokens)."""
    weights: str = "auto"
    """auto | dequantized (to `dtype`) | packed (kept in the checkpoint's low-bit blocks)."""
    device: str = "auto"
    """auto (a GPU where there is one and the model has kernels for it) | cpu | cuda."""
    num_threads: int = 0
    """Compute threads; 0: the cores this process may use; count."""
    page_size: int = 64
    """Tokens per KV page; a power of two."""
    kv_pool_tokens: int = 0
    """KV capacity; 0: from free memory, bounded on a CPU; tokens."""
    max_slots: int = 16
    """Requests that run in one step; count."""
    token_budget: int = 0
    """Prefill and decode tokens in one step; 0: 512 on a CPU, 4096 on a GPU; tokens."""
    lone_token_budget: int = 0
    """The same while one prompt has the engine to itself; `token_budget` if that is more; 0: 16384
    on a GPU where `token_budget` is 0; tokens."""
    max_context_len: int = 0
    """Prompt and output of one request; 0: what the model was trained for; tokens."""
    eager: bool = False
    """Run without captured graphs."""
    prefill_graphs: bool = True
    """Capture what layers of a step of up to 4096 tokens do beside attention, too (on a GPU)."""
    deterministic: bool = False
    """Same tokens whatever the batch, chunking or cache state; slower (a CPU computes a token at a
    time)."""
    kernels: str = ""
    """Kernels to run instead of the chosen ones, `family=name` each, comma-separated."""
    speculation: str = "none"
    """none | ngram (drafts from what the request already said: the same tokens, sooner) | mtp (one
    draft a step from a model's next-token-prediction layer)."""
    max_draft_tokens: int = 8
    """Drafts a request gets in one step, where `speculation` is ngram; count."""
    step_trace: str = ""
    """File for one JSON line a step: its rows, tokens and times (it grows); empty: none."""
    run_dir: str = field(default_factory=default_run_dir)
    """Directory of the engine's socket; created if missing."""
    drain_s: float = 10.0
    """On SIGTERM, how long running requests may still finish; seconds."""
    grammar: GrammarConfig = GrammarConfig()
    scheduler: SchedulerLimits = SchedulerLimits()
    tiers: TiersConfig = TiersConfig()

    def tokens_per_step(self, device: str) -> int:
        """The token budget on a device ("cpu" or "cuda")."""
        return self.token_budget or max(self.max_slots, TOKEN_BUDGETS[device])

    def tokens_per_lone_step(self, device: str) -> int:
        """The same of a step that one prompt has alone, while nobody waits: no less."""
        usual = self.tokens_per_step(device)
        default = LONE_TOKEN_BUDGETS[device] if self.token_budget == 0 else usual
        return max(usual, self.lone_token_budget or default)

    @property
    def rows_per_step(self) -> int:
        """The most rows a step has: each draft is a row of its own."""
        return max(self.max_slots, self.drafted_tokens)

    @property
    def drafted_tokens(self) -> int:
        """The most tokens of a step with drafts; 0: there are none."""
        return 0 if self.speculation == "none" else TOKENS_WITH_DRAFTS

    @property
    def longest_chain(self) -> int:
        """The most tokens of one sequence in a decode step."""
        return {"none": 1, "ngram": 1 + self.max_draft_tokens, "mtp": 2}[self.speculation]

    @property
    def socket_path(self) -> str:
        """Where the engine listens (a Unix socket)."""
        return str(Path(self.run_dir) / "engine.sock")

    def problems(self) -> Iterator[ConfigError]:
        """Every wrong field, in declaration order."""
        yield from _model_problems(self)
        yield from _limit_problems(self)
        yield from _nested_problems(self)

    def validate(self) -> None:
        """Raises: ConfigError for the first wrong field."""
        for problem in self.problems():
            raise problem

    def to_json(self) -> bytes:
        """This configuration as JSON, which `from_json` reads back."""
        return msgspec.json.encode(self)


def from_json(text: bytes | str) -> EngineConfig:
    """Read and validate a configuration. Raises: ConfigError."""
    try:
        values = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError("engine", text[:80], "a JSON object", str(error)) from error
    return from_mapping(values)


def from_mapping(values: object) -> EngineConfig:
    """Build and validate a configuration from plain dicts. Raises: ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError("engine", values, "a mapping of settings")
    config: EngineConfig = _build(EngineConfig, values, "engine")
    config.validate()
    return config


def _build(cls: Any, values: Mapping[str, object], path: str) -> Any:
    hints = get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{path}.{name}", value, f"one of {', '.join(sorted(known))}")
        arguments[name] = _convert(hints[name], value, f"{path}.{name}")
    return cls(**arguments)


def _convert(hint: Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(path, value, "a table of settings")
        return _build(hint, value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(path, value, f"a value of type {hint.__name__}")
    return value


def _model_problems(config: EngineConfig) -> Iterator[ConfigError]:
    try:
        resolve_model(config.model)
    except ModelNotFoundError as error:
        yield ConfigError("engine.model", config.model, "a model that is there", str(error))
    for name, allowed in (
        ("load_format", LOAD_FORMATS),
        ("dtype", DTYPES),
        ("kv_dtype", KV_DTYPES),
        ("weights", WEIGHT_FORMATS),
        ("speculation", SPECULATIONS),
        ("device", DEVICES),
    ):
        value = getattr(config, name)
        if value not in allowed:
            yield ConfigError(f"engine.{name}", value, " | ".join(allowed))


def _limit_problems(config: EngineConfig) -> Iterator[ConfigError]:
    yield from _range(config, "num_threads", 0, 1024)
    size = config.page_size
    if not 1 <= size <= 1024 or size & (size - 1):
        yield ConfigError("engine.page_size", size, "a power of two, 1 to 1024")
    yield from _range(config, "kv_pool_tokens", 0, 1 << 31)
    if 0 < config.kv_pool_tokens < 2 * size:
        yield ConfigError(
            "engine.kv_pool_tokens", config.kv_pool_tokens, f"0, or at least 2 pages ({2 * size})"
        )
    yield from _range(config, "max_slots", 1, 4096)
    yield from _range(config, "token_budget", 0, 1 << 20)
    if 0 < config.token_budget < config.max_slots:
        yield ConfigError(
            "engine.token_budget",
            config.token_budget,
            f"0, or at least engine.max_slots ({config.max_slots})",
            "a step must hold one token of every running request",
        )
    yield from _range(config, "lone_token_budget", 0, 1 << 20)
    yield from _range(config, "max_context_len", 0, 1 << 24)
    yield from _range(config, "max_draft_tokens", 1, TOKENS_WITH_DRAFTS - 1)
    yield from _range(config, "drain_s", 0.0, 3600.0)
    path = config.socket_path.encode()
    if len(path) > MAX_SOCKET_PATH_BYTES:
        yield ConfigError(
            "engine.run_dir",
            config.run_dir,
            f"a path short enough for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes with its name)",
        )


def _nested_problems(config: EngineConfig) -> Iterator[ConfigError]:
    yield from _range(config, "grammar.compile_threads", 1, 64)
    yield from _range(config, "grammar.budget_ms", 1, 600_000)
    yield from _range(config, "grammar.cache_bytes", 0, 1 << 40)
    yield from _range(config, "scheduler.max_waiting", 1, 1 << 20)
    yield from _range(config, "scheduler.keep_outputs_s", 0.0, 86_400.0)
    yield from _range(config, "scheduler.keep_outputs_bytes", 0, 1 << 40)
    yield from _tier_problems(config)


def _tier_problems(config: EngineConfig) -> Iterator[ConfigError]:
    tiers = config.tiers
    yield from _range(config, "tiers.l2_bytes", -1, 1 << 44)
    yield from _range(config, "tiers.l3_quota_bytes", 1 << 20, 1 << 50)
    yield from _range(config, "tiers.l3_wait_ms", 0, 600_000)
    yield from _range(config, "tiers.mooncake_segment_bytes", 1 << 24, 1 << 44)
    yield from _range(config, "tiers.mooncake_ssd_quota_bytes", 1 << 24, 1 << 50)
    for name, allowed in (
        ("l3", L3_KINDS),
        ("overlap_loads", OVERLAPS),
        ("mooncake_protocol", MOONCAKE_PROTOCOLS),
    ):
        value = getattr(tiers, name)
        if value not in allowed:
            yield ConfigError(f"engine.tiers.{name}", value, " | ".join(allowed))
    if tiers.l3 in ("file", "mooncake") and tiers.l2_bytes == 0:
        yield ConfigError(
            "engine.tiers.l3",
            tiers.l3,
            "none where engine.tiers.l2_bytes is 0",
            "pages reach the store through L2",
        )
    if tiers.l3 == "file" and not tiers.l3_dir:
        yield ConfigError("engine.tiers.l3_dir", "", "a directory, where engine.tiers.l3 is file")
    for name in ("mooncake_master", "mooncake_metrics"):
        address = getattr(tiers, name)
        host, colon, port = address.rpartition(":")
        if address and not (host and colon and port.isdigit()):
            yield ConfigError(f"engine.tiers.{name}", address, "host:port")
    if tiers.mooncake_metrics and not tiers.mooncake_master:
        yield ConfigError(
            "engine.tiers.mooncake_metrics",
            tiers.mooncake_metrics,
            "empty where engine.tiers.mooncake_master is",
            "a private master's is known",
        )


def _range(config: EngineConfig, path: str, low: float, high: float) -> Iterator[ConfigError]:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    if not low <= value <= high:
        yield ConfigError(f"engine.{path}", value, f"{spelled(low)} to {spelled(high)}")
