# SPDX-License-Identifier: Apache-2.0
"""The contract between the API process and the engine process: wire messages, nothing else.

Does not know: HTTP, sessions, chat templates, torch. Every message is a msgspec tagged union
member; token ids travel as raw little-endian int32 bytes, never as JSON numbers. A client sends
one EngineInput a frame, the engine an array of EngineOutput (`engine.transport`).
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a request stopped. `stop` covers EOS, stop ids and a completed grammar."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class GrammarKind(enum.StrEnum):
    STRUCTURAL_TAG = "structural_tag"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar as text; the engine compiles it (cached by content) before the request runs."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens. temperature 0 is greedy. Validated by `engine.loop.intake`."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn per request
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own EOS ids
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the sampled token's; k: and the k likeliest
    mask_control_tokens: bool = True  # never sample a control token other than a stop id
    # Control tokens that may be sampled all the same: the markers that this turn's grammar names.
    # A grammar allows them only there, never as text; without one they may come anywhere.
    allowed_control_ids: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, tag="generate", kw_only=True):
    """Run one request.

    `token_ids`: the whole prompt, int32 bytes. `resume_token_ids`: output already sampled in an
    earlier life of this request (engine restart): appended to the prompt, counted as output.
    """

    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    priority: int = 0  # lower runs first
    tenant: str = "default"
    salt: str = ""  # tenant salt: prefixes are shared only within (model, salt)
    resume_token_ids: bytes = b""


class AbortRequest(msgspec.Struct, tag="abort", kw_only=True):
    request_id: str


class AttachRequest(msgspec.Struct, tag="attach", kw_only=True):
    """Re-subscribe to a running or recently finished request (after an API process restart).

    The engine answers with `Started`, one `Tokens` holding everything from `from_output`, and,
    where it has ended, `Finished`; or `Finished{error: unknown_request}`.
    """

    request_id: str
    from_output: int = 0


class CompileGrammar(msgspec.Struct, tag="compile_grammar", kw_only=True):
    compile_id: str
    grammar: GrammarSpec
    budget_ms: int = 2000


class QueryStats(msgspec.Struct, tag="query_stats", kw_only=True):
    query_id: str


class QueryTree(msgspec.Struct, tag="query_tree", kw_only=True):
    """Ask for a bounded snapshot of the radix tree (admin CLI)."""

    query_id: str
    max_nodes: int = 256


class QueryPrefix(msgspec.Struct, tag="query_prefix", kw_only=True):
    """Ask how much of a prefix is resident, per tier, without touching recency."""

    query_id: str
    token_ids: bytes
    salt: str = ""


class DropPrefix(msgspec.Struct, tag="drop_prefix", kw_only=True):
    """Release the KV of this prefix from `keep_tokens` on, where no one else shares it."""

    token_ids: bytes
    keep_tokens: int = 0
    salt: str = ""


class LeasePrefix(msgspec.Struct, tag="lease_prefix", kw_only=True):
    """Promise to evict this prefix last, for so long; a lease of the same id is replaced.

    tier: l1 | l2 | l3, where it is kept; the lease covers what of the prefix lies there. The
    answer is a `LeaseReply`; what becomes of the lease later, a `LeaseChanged` to this peer.
    Leases do not outlive their engine process.
    """

    query_id: str
    lease_id: str
    token_ids: bytes
    ttl_ms: int
    tenant: str = "default"
    salt: str = ""
    tier: str = "l1"


class ReleaseLease(msgspec.Struct, tag="release_lease", kw_only=True):
    """End a lease, granted or queued; nothing happens if there is none."""

    lease_id: str


class HintPrefix(msgspec.Struct, tag="hint_prefix", kw_only=True):
    """Say how likely (0 to 1) the end of a cached prefix is to be continued.

    `hold_lX_ms`: how long from now the prefix should stay in that tier before it moves on to the
    next one below; 0 leaves that unsaid. Holds are wishes: pressure comes first.
    """

    query_id: str
    token_ids: bytes
    expected_return: float
    salt: str = ""
    hold_l1_ms: int = 0
    hold_l2_ms: int = 0
    hold_l3_ms: int = 0


class MovePrefix(msgspec.Struct, tag="move_prefix", kw_only=True):
    """Bring the full pages of a prefix to a tier; the answer is a `MoveReply`.

    tier: `l1` prefetches up to the device; `l2` leaves L1, or comes up from L3; `l3` is stored,
    then leaves L1 and L2; `none` is forgotten everywhere. Pages that somebody uses stay.
    """

    query_id: str
    token_ids: bytes
    tier: str
    salt: str = ""


class QueryTiers(msgspec.Struct, tag="query_tiers", kw_only=True):
    query_id: str


class DrainTiers(msgspec.Struct, tag="drain_tiers", kw_only=True):
    """Finish every write-back and store under way, within `timeout_ms`."""

    query_id: str
    timeout_ms: int = 10_000


class VerifyTiers(msgspec.Struct, tag="verify_tiers", kw_only=True):
    """Read pages of L2 and L3 back and check them; a bad one is dropped."""

    query_id: str
    max_pages: int = 4096


class SubscribeKvEvents(msgspec.Struct, tag="subscribe_kv_events", kw_only=True):
    """From now on send (or stop sending) `KvEventBatch` to this peer."""

    enabled: bool = True


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    sent_ms: int


EngineInput = (
    GenerateRequest
    | AbortRequest
    | AttachRequest
    | CompileGrammar
    | QueryStats
    | QueryTree
    | QueryPrefix
    | DropPrefix
    | LeasePrefix
    | ReleaseLease
    | HintPrefix
    | MovePrefix
    | QueryTiers
    | DrainTiers
    | VerifyTiers
    | SubscribeKvEvents
    | Ping
)


class CacheHit(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens found in each tier, and those to compute."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    to_compute: int = 0


class Started(msgspec.Struct, tag="started", kw_only=True):
    """The request was admitted; `cache` says what its prefix cost, pages that a step reads as they
    come included, once they are known to be good."""

    request_id: str
    cache: CacheHit
    queued_ms: float = 0.0


class PrefillProgress(msgspec.Struct, tag="prefill_progress", kw_only=True):
    request_id: str
    done: int
    total: int


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Tokens(msgspec.Struct, tag="tokens", kw_only=True):
    """Sampled ids, `start` counted in output tokens of the request (resumed ones included)."""

    request_id: str
    start: int
    token_ids: bytes
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Finished(msgspec.Struct, tag="finished", kw_only=True):
    """Terminal. Its KV is in the radix tree when this is sent (unless `error`).

    `num_cached_tokens`: tokens of prompt + output whose KV the tree now holds.
    `page_hashes`: 16 bytes per full page of that prefix.
    """

    request_id: str
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    page_hashes: bytes = b""
    error_code: str | None = None
    error_message: str | None = None


class GrammarCompiled(msgspec.Struct, tag="grammar_compiled", kw_only=True):
    compile_id: str
    compile_ms: float
    cached: bool
    error_code: str | None = None  # invalid_grammar | grammar_budget_exceeded
    error_message: str | None = None


class KvEventBatch(msgspec.Struct, tag="kv_events", kw_only=True):
    """Cache changes in order. kind: stored | moved | removed; hashes are 16 bytes each.

    The client adds one kind of its own, `reset`: the cache is gone or events were lost; forget
    what earlier events said.
    """

    events: tuple[KvEvent, ...]


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    tier: str
    page_hash: bytes
    parent_hash: bytes
    num_tokens: int


class StatsReply(msgspec.Struct, tag="stats", kw_only=True):
    query_id: str
    stats: dict[str, float]


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    node_id: int
    parent_id: int  # -1: a root (one per namespace)
    num_tokens: int
    num_pages: int
    num_children: int
    num_users: int
    last_used_ms: int
    page_hash: bytes  # of its last full page
    first_token_ids: bytes  # up to 16, for a human to recognise; empty: only lower tiers have it
    num_l1_pages: int = 0
    num_l2_pages: int = 0  # full ones with a copy there
    num_l3_pages: int = 0


class TreeReply(msgspec.Struct, tag="tree", kw_only=True):
    query_id: str
    nodes: tuple[TreeNode, ...]
    truncated: bool


class PrefixReply(msgspec.Struct, tag="prefix", kw_only=True):
    query_id: str
    cache: CacheHit


class LeaseReply(msgspec.Struct, tag="lease", kw_only=True):
    """state: granted | clipped | queued | denied; reason: "" | not_resident | budget |
    tenant_budget | expired."""

    query_id: str
    state: str
    tokens_requested: int
    tokens_granted: int
    reason: str = ""


class LeaseChanged(msgspec.Struct, tag="lease_changed", kw_only=True):
    """kind: granted | clipped | denied (was queued), demoted (under pressure: from now on it covers
    that much in l2), revoked (it lost the rest), expired."""

    lease_id: str
    kind: str
    num_tokens: int  # still covered


class HintReply(msgspec.Struct, tag="hint", kw_only=True):
    query_id: str
    num_tokens: int  # of the prefix that the cache holds


class MoveReply(msgspec.Struct, tag="move", kw_only=True):
    """Sent when the transfers that the move caused are over, when none came to its end for 3 s, or
    after 30 s."""

    query_id: str
    cache: CacheHit  # where the prefix is now
    num_pending: int = 0  # transfers that were not over in time


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tier now. state: up | degraded | down | off; `reason` says why it is not up."""

    tier: str  # l1 | l2 | l3
    kind: str  # cpu | cuda | shared_memory | private_memory | file | mooncake | none
    state: str
    reason: str = ""
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_pages: int = 0
    counters: dict[str, float] = {}


class TiersReply(msgspec.Struct, tag="tiers", kw_only=True):
    query_id: str
    tiers: tuple[TierStatus, ...]


class DrainReply(msgspec.Struct, tag="tiers_drained", kw_only=True):
    """num_pages came down a tier, num_lost could not, num_pending were not over in time.

    is_flushed: the store has made what it was given as safe as it gets; false: it did not in time.
    """

    query_id: str
    num_pages: int
    num_lost: int = 0
    num_pending: int = 0
    is_flushed: bool = True


class VerifyReply(msgspec.Struct, tag="tiers_verified", kw_only=True):
    """By tier (l2, l3): pages read back, and those whose bytes were not what they should be."""

    query_id: str
    checked: dict[str, int]
    bad: dict[str, int]


class QueryRefused(msgspec.Struct, tag="query_refused", kw_only=True):
    """A question with a field the engine cannot take, in place of its answer."""

    query_id: str
    error_code: str
    error_message: str


class EngineHello(msgspec.Struct, tag="hello", kw_only=True):
    """Answer to the first message of a peer, and broadcast on start.

    A changed `instance_id` tells the client that the engine was restarted.
    """

    instance_id: str
    model_fingerprint: str
    vocab_size: int
    max_context_len: int
    page_size: int
    num_pages: int


class Pong(msgspec.Struct, tag="pong", kw_only=True):
    sent_ms: int
    instance_id: str


EngineOutput = (
    Started
    | PrefillProgress
    | Tokens
    | Finished
    | GrammarCompiled
    | KvEventBatch
    | StatsReply
    | TreeReply
    | PrefixReply
    | LeaseReply
    | LeaseChanged
    | HintReply
    | MoveReply
    | TiersReply
    | DrainReply
    | VerifyReply
    | QueryRefused
    | EngineHello
    | Pong
)
