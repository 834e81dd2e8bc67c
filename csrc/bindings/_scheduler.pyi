# SPDX-License-Identifier: Apache-2.0
"""Contract of the control plane. Written by hand, held against the built extension by a test."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class SchedulerConfig:
    def __init__(
        self,
        *,
        page_size: int = 64,
        num_pages: int,
        max_slots: int,  # rows that may run at once
        max_context_len: int,  # tokens; page table width = ceil(. / page_size) + 1
        token_budget: int = 512,  # prefill + decode tokens per step
        lone_token_budget: int = 0,  # of a step that one prompt has alone; at least token_budget
        model_fingerprint: str = "",
        ageing_ms: int = 10_000,  # waiting this long is worth one priority class
        suffix_us_per_token: int = 800,  # an uncached token delays its request by this much
        spare_percent: int = 25,  # of the pool: with less to be had, streams come first; 0: never
        eviction: str = "value",  # value | lru
        attention_len: int = 32768,  # context at which recomputing a token costs twice
        lease_percent: int = 50,  # of the pool, for all leases
        tenant_lease_percent: int = 25,  # of the pool, where several tenants hold leases
        num_l2_pages: int = 0,  # of the host pool; 0: one tier only
        use_l3: bool = False,  # full pages go on to the store, and are fetched from it
        num_l3_pages: int = 1 << 22,  # of the store: names remembered, the pool its leases share
        probe_l3: bool = False,  # plans ask what L3 has behind a new prompt's known hit
        l3_wait_ms: int = 0,  # how long a request waits for that answer; 0: best effort, not at all
        overlap_loads: bool = False,  # a request runs while pages of L2 still come, see row_loads
        max_preemptions: int = 2,  # times a request gives its place to a better class; 0: never
    ) -> None: ...
    page_size: int
    num_pages: int
    max_slots: int
    max_context_len: int
    token_budget: int
    lone_token_budget: int
    model_fingerprint: str
    ageing_ms: int
    suffix_us_per_token: int
    spare_percent: int
    eviction: str
    attention_len: int
    lease_percent: int
    tenant_lease_percent: int
    num_l2_pages: int
    use_l3: bool
    num_l3_pages: int
    probe_l3: bool
    l3_wait_ms: int
    overlap_loads: bool
    max_preemptions: int

class RequestSpec:
    """What is asked. token_ids is kept, not copied: leave it as it is until it was submitted."""

    def __init__(
        self,
        *,
        request_id: int,
        token_ids: NDArray[np.int32],
        max_new_tokens: int,
        priority: int = 0,
        tenant: str = "default",
        salt: str = "",
        expected_return: float = 0.5,  # chance that prompt + output is continued: eviction value
        num_draft_tokens: int = 0,  # a decode row has up to 1 + that many tokens, drafts as -1
        remote_prefill: bool = False,  # another engine computes the prompt, see Admission.remote
        l3_wait_ms: int = -1,  # -1: as configured
        send_kv: bool = False,  # another engine goes on: the KV stays until SendDone, see Send
    ) -> None: ...
    request_id: int
    token_ids: NDArray[np.int32]
    max_new_tokens: int
    priority: int
    tenant: str
    salt: str
    expected_return: float
    num_draft_tokens: int
    remote_prefill: bool
    l3_wait_ms: int
    send_kv: bool

class StepDone:
    """Results of one planned step, arrays in the plan's row order.

    num_accepted[r] tokens of row r are token_ids[r, :]; 0 for rows that did not sample. A decode
    row of 1 + k tokens (k drafts) may accept up to 1 + k: the accepted drafts and one more.
    finished[r] != 0: the request is over after those tokens. failed[r] != 0: NaN or an engine
    error; the row's KV is never published.
    """

    def __init__(
        self,
        *,
        step_id: int,
        num_accepted: NDArray[np.int32],
        token_ids: NDArray[np.int32],  # [R, K]
        finished: NDArray[np.uint8],
        failed: NDArray[np.uint8],
    ) -> None: ...
    step_id: int
    num_accepted: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    finished: NDArray[np.uint8]
    failed: NDArray[np.uint8]

class Abort:
    def __init__(self, *, request_id: int) -> None: ...
    request_id: int

class TransferAck:
    def __init__(self, *, ticket: int, ok: bool) -> None: ...
    ticket: int
    ok: bool

class RemotePrefill:
    """A remote prefill is over. ok: the KV of every prompt token but the last is in the pages the
    admission named; else it is computed here. Nothing writes to those pages afterwards."""

    def __init__(self, *, request_id: int, ok: bool) -> None: ...
    request_id: int
    ok: bool

class ProbeDone:
    """The first num_pages of the pages a plan asked for are in L3. Each probe is answered once, 0
    where nothing is known; requests that wait for it wait no longer than their l3_wait_ms."""

    def __init__(self, *, probe_id: int, num_pages: int) -> None: ...
    probe_id: int
    num_pages: int

class SendDone:
    """The other engine reads a request's KV no longer (see Send); ok: it has it all."""

    def __init__(self, *, request_id: int, ok: bool) -> None: ...
    request_id: int
    ok: bool

Event = StepDone | Abort | TransferAck | RemotePrefill | ProbeDone | SendDone

def fsm_table() -> list[tuple[str, str, str]]:
    """Every (state, event, next state), next state "" where the pair is illegal."""

def name_pages(
    token_ids: NDArray[np.int32],
    *,
    page_size: int,
    model_fingerprint: str = "",
    salt: str = "",
    parent: bytes = b"",
) -> bytes:
    """Names of the full pages of `token_ids`, 16 bytes each; parent: the name of the page before
    them, b"" where they begin a prefix. Raises ValueError for a parent that is no name."""

class Admission:
    """A request entered the running set in this plan (again, after a retraction: readmitted)."""

    request_id: int
    slot: int
    prompt_len: int
    cached_l1: int
    cached_l2: int
    cached_l3: int
    readmitted: bool
    remote: bool  # no row until RemotePrefill: the page deltas say where the KV is to be written

class Ended:
    """A request left the scheduler. status: finished | aborted | failed."""

    request_id: int
    status: str
    message: str
    num_cached_tokens: int  # tokens of prompt + output the tree now holds
    page_hashes: bytes  # 16 bytes per full page of that prefix

class Plan:
    """One step. Arrays are views, valid until the next call of next_plan. T tokens, R rows."""

    step_id: int  # -1: nothing to run
    row_request_ids: NDArray[np.int64]  # [R] prefill rows first
    row_slots: NDArray[np.int32]  # [R]
    row_starts: NDArray[np.int32]  # [R] KV tokens in place before the step
    row_lens: NDArray[np.int32]  # [R] tokens of the row in this step
    row_samples: NDArray[np.uint8]  # [R] 1: the last token's logits are sampled
    # [R, 2] tickets [first, end) of load_backs into pages the row reads, in the order of its pages;
    # -1, -1: none. Its step reads a layer of them once that layer is there, and its StepDone comes
    # behind their acks: an earlier one is refused. If one was lost the row counts for nothing: it
    # accepts no token (0 is the only num_accepted), and the request is planned from there anew.
    row_loads: NDArray[np.int64]
    input_ids: NDArray[np.int32]  # [T] -1: the id is on the device, next_input_ids[slot]
    slot_mapping: NDArray[np.int32]  # [T] page * page_size + offset
    page_deltas: NDArray[np.int32]  # [D, 3] (slot, index, page) to write in the page table
    page_copies: NDArray[np.int32]  # [C, 3] (source page, target page, tokens) before the step
    admissions: list[Admission]
    # [M, 6] (ticket, kind, source tier, source page, target tier, target page), to be acked each;
    # kind 0 load_back, 1 write_back, 2 fetch, 3 store; tiers 1 2 3; page -1: L3, by hash alone.
    # A plan without rows (step_id -1) may have moves. Write-backs read what earlier steps wrote.
    moves: NDArray[np.int64]
    move_hashes: NDArray[np.uint8]  # [M, 16]
    # Probe p asks which leading pages of probe_hashes[probe_indptr[p]:probe_indptr[p + 1]] are in
    # L3; to be answered by ProbeDone. A plan without rows may ask.
    probe_ids: NDArray[np.int64]  # [P]
    probe_indptr: NDArray[np.int32]  # [P + 1]; empty where P is 0
    probe_hashes: NDArray[np.uint8]  # [H, 16]
    retracted: list[int]  # request ids that gave their pages back and wait again

class Send:
    """A request with send_kv has finished here: another engine may read the KV of its first
    num_tokens from these pages, which stay until SendDone. Then it is Ended: finished, or failed if
    the other engine did not take it. An abort before that waits for SendDone too."""

    request_id: int
    slot: int
    num_tokens: int
    pages: NDArray[np.int32]
    page_hashes: bytes  # of the full ones

class MoveResult:
    """Where the full pages of a prefix stand; there + pending + missing == all their tokens."""

    tokens_there: int  # in the target tier
    tokens_pending: int  # in tickets, or waiting for room: the order stands until they are there
    tokens_missing: int  # in no tier they could come from
    num_pages: int  # this call set moving (l1), freed from L1 (l2, l3), or dropped (none)

class KvEvent:
    kind: str  # stored | moved | removed
    tier: str  # l1 | l2 | l3
    page_hash: bytes
    parent_hash: bytes
    num_tokens: int

class LeaseGrant:
    """state: granted | clipped | queued | denied; reason: "" | not_resident | budget |
    tenant_budget | expired."""

    state: str
    tokens_requested: int
    tokens_granted: int
    reason: str

class LeaseEvent:
    """kind: granted | clipped | denied (was queued), demoted (pressure: it covers that much in L2
    from now on), revoked (pressure or a failed transfer cut it), expired."""

    lease_id: int
    kind: str
    num_tokens: int  # still covered

class TreeNode:
    node_id: int
    parent_id: int
    num_tokens: int
    num_pages: int
    num_l2_pages: int  # full ones with a copy there
    num_l3_pages: int
    num_children: int
    num_users: int
    last_used_ms: int
    page_hash: bytes
    first_token_ids: NDArray[np.int32]

class LowerPage:
    """A page that is in a lower tier and not in L1. parent_hash: zeros for a first page."""

    page_hash: bytes
    parent_hash: bytes
    in_l2: bool
    in_l3: bool

class PrefixHit:
    """Tokens by the nearest tier that has them; pending: in pages on their way, or to be moved."""

    l1: int
    l2: int
    l3: int
    pending: int

class Scheduler:
    """Single-threaded. A step may be planned before the results of the one before it are in."""

    def __init__(self, config: SchedulerConfig) -> None: ...
    def submit(self, specs: Sequence[RequestSpec]) -> None:
        """Queue requests. Raises ValueError naming the field; then none of them was inserted."""

    def next_plan(self, now_ms: int) -> Plan: ...
    def advance(self, events: Sequence[Event]) -> list[Ended]:
        """Apply results in order. Raises ValueError for an unknown request or step id."""

    def query_prefix(self, token_ids: NDArray[np.int32], salt: str = "") -> PrefixHit: ...
    def drop_prefix(
        self, token_ids: NDArray[np.int32], keep_tokens: int = 0, salt: str = ""
    ) -> int:
        """Free what of this prefix nobody uses or shares, from the page after keep_tokens on, in
        every tier; returns the pages freed in L1. What is on its way to L2 or L3 goes when it has
        come, unless it is used till then."""

    def hint_prefix(
        self,
        token_ids: NDArray[np.int32],
        expected_return: float,
        salt: str = "",
        *,
        l1_until_ms: int = 0,
        l2_until_ms: int = 0,
        l3_until_ms: int = 0,
    ) -> int:
        """Say how likely the end of a cached prefix is to be continued; returns tokens found.

        Until a tier's deadline (0: no wish) the prefix is worth more there, no promise (that is a
        lease). When L1's passes, an idle end goes to L2; when L2's passes, what L3 has of it leaves
        L2; when L3's passes, it is forgotten there (KvEvent removed l3). A new hint replaces all.
        """

    def set_costs(
        self,
        *,
        l2_us_per_page: float = 0.0,  # L2 -> L1
        l3_us_per_page: float = 0.0,  # L3 -> L2
        prefill_us_per_token: float = 0.0,  # at the start of a context; 0: unknown, always fetch
    ) -> None:
        """Measured speeds: a request fetches only what is there sooner than it would be computed,
        and waits for a fetch no longer than computing would take."""

    def set_num_draft_tokens(self, request_id: int, num_draft_tokens: int) -> None:
        """Change how many drafts a request's decode rows have, from the next plan on. Raises
        ValueError for an unknown request."""

    def move(self, token_ids: NDArray[np.int32], tier: str, salt: str = "") -> MoveResult:
        """Bring the full pages of a prefix to a tier: l1 (prefetch, through L2), l2 (down from L1
        and up from L3), l3 (stored where they are not), none (forgotten everywhere).

        What lies above l2 or l3 is let go of then, unless it is used or leased. What cannot be had
        at once stays a standing order that next_plan works on; the same call says how far it is. A
        call with another tier replaces the order.
        """

    def adopt(
        self,
        tier: str,
        token_ids: NDArray[np.int32],
        page_hashes: bytes,
        pages: NDArray[np.int32],
        salt: str = "",
        *,
        before: bytes = b"",  # the page they follow, which need not be anywhere
        start: int = 0,  # tokens up to and with that page
    ) -> int:
        """Take in full pages of a prefix that survived a restart: l2 with its page ids, l3 by name.
        Pages that L2 holds already are passed over, whatever page id is said for them. Pages whose
        head is nowhere are found once it is known again: computed, or in L3.

        Raises ValueError for a name that is not that of its tokens, or a page that is not free.
        """

    def lose_l3(self, page_hashes: bytes) -> int:
        """The store said that it does not have these pages (16 bytes each, heads first), which it
        was given or was thought to have. What L2 has of them is stored again by the next plan;
        a page that nobody has any longer is missing. Unknown names are passed over.

        Returns how many of them were thought to be in L3. Raises ValueError for half a name.
        """

    def lease(
        self,
        *,
        lease_id: int,
        token_ids: NDArray[np.int32],
        until_ms: int,
        tenant: str = "default",
        salt: str = "",
        tier: str = "l1",
    ) -> LeaseGrant:
        """Promise to evict a prefix last (l1) or not at all (l2, l3), until a deadline.

        It covers what of the prefix the tier has (l2: or L1, which is sent down). A lease of the
        same id is replaced.
        """

    def release(self, lease_id: int) -> bool:
        """End a lease, granted or queued; False if there is none of that id."""

    def drain_sends(self) -> list[Send]:
        """Requests that finished since the last call and whose KV waits to be read."""

    def drain_lease_events(self) -> list[LeaseEvent]: ...
    def drain_kv_events(self) -> list[KvEvent]: ...
    def stats(self) -> dict[str, int]:
        """free_, owned_, cached_, in_flight_pages and num_pages; running, waiting; counters."""

    def tree(self, max_nodes: int = 256) -> list[TreeNode]: ...
    def lower_pages(self, max_pages: int = 4096) -> list[LowerPage]:
        """Pages that only lower tiers have, heads of chains first."""

    def check_integrity(self) -> None:
        """Abort-level invariants, walked in full; raises RuntimeError with what is broken."""
