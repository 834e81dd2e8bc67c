# SPDX-License-Identifier: Apache-2.0
"""Builds what the API process works with, once, and knows how a session maps onto the model.

The only constructor of store, engine client, renderer and compiler. Does not know: HTTP, how a
turn runs.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from appliance.answer import AnswerReader
from appliance.background import BackgroundWork
from appliance.cache_report import MODEL_CHANGED, REPORT
from appliance.config import ApplianceConfig
from appliance.errors import ApiError
from appliance.grammars import GrammarCompiler, control_markers
from appliance.implicit_sessions import ImplicitSessions
from appliance.metrics import Metrics
from appliance.observed_store import ObservedStore
from appliance.prompts import Head, HistoryEnd, PromptRenderer
from appliance.recall import Recall
from appliance.recall_journal import RecallJournal
from appliance.response_events import ResponseEvents, derived_id
from appliance.response_store import ResponseStore
from appliance.session_hub import SessionHub
from appliance.stores import build_store
from appliance.supervisor import read_admin_key, read_state
from appliance.thinking import thinking_options
from appliance.turn_events import EventJournals
from engine.client import EngineClient
from engine.text.assets import TextAssets, load_text_assets
from sessions.history import replace_history
from sessions.items import FunctionCall, Item
from sessions.quota import check_quota, effective_quota, validate_quota
from sessions.session import Session, items_record
from sessions.store import SessionStore, TenantQuota
from sessions.token_codec import TOKEN_BYTES, decode_ids
from sessions.turn_log import PRELUDE, Record, TurnLog
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import (
    DEFAULT_FORMAT,
    format_names,
    get_format,
    guess_format,
)
from tools_schema.reasoning import Reasoning, reasoning_of_prompt
from tools_schema.stream_parser import CALL_PREFIX, StreamParser, new_call_id
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet, parse_tools

logger = logging.getLogger(__name__)

MAX_TOOLSETS = 256
REASONING_TAIL = 24  # tokens; a reasoning marker spelled in plain tokens fits
DEFAULT_MODEL_NAME = "default"
DEFAULT_TENANT = "default"
FIRST_CONTACT_S = 30.0
QUOTA_FRESH_S = 2.0
RELOAD_S = 60.0  # that an engine may take to load before turns give it up


@dataclass(slots=True, kw_only=True)
class Services:
    """Shared by every request of this process."""

    config: ApplianceConfig
    assets: TextAssets
    renderer: PromptRenderer
    store: SessionStore
    client: EngineClient
    grammars: GrammarCompiler
    journals: EventJournals
    metrics: Metrics
    hub: SessionHub
    clock_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    admin_key: str = ""
    owner: str = ""  # this API process among those that share the store; the same after a restart
    responses: ResponseStore = field(default_factory=ResponseStore)
    background: BackgroundWork = field(default_factory=BackgroundWork)
    recall: Recall = field(default_factory=Recall)
    implicit_sessions: ImplicitSessions = field(default_factory=ImplicitSessions)
    started_s: int = field(default_factory=lambda: int(time.time()))
    _quotas: dict[str, tuple[TenantQuota, float]] = field(default_factory=dict)
    _toolsets: OrderedDict[bytes, ToolSet] = field(default_factory=OrderedDict)

    # Models -------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.config.server.model_name or self.assets.name

    @property
    def model_names(self) -> list[str]:
        """The model's own name, then its aliases."""
        names = [self.model_name, DEFAULT_MODEL_NAME, *self.config.server.model_aliases]
        return list(dict.fromkeys(names))

    def check_model(self, name: str) -> str:
        """Return the name of the model served as `name`. Raises ApiError model_not_found."""
        if name in self.model_names or self.config.server.alias_all:
            return self.model_name
        raise ApiError(
            "model_not_found",
            f"model: {name!r} is not served here (served: {', '.join(self.model_names)})",
            "model",
        )

    @property
    def max_context_len(self) -> int:
        """What the engine says, or before its first word what the model was trained for."""
        hello = self.client.hello
        limits = [self.assets.max_context_len]
        if hello is not None:
            limits.append(hello.max_context_len)
        if self.config.engine.max_context_len:
            limits.append(self.config.engine.max_context_len)
        return min(limits)

    def context_limit(self, session: Session) -> int:
        """Tokens this session may hold, output included."""
        own = session.settings.context.max_tokens
        return self.max_context_len if own is None else min(own, self.max_context_len)

    # Sessions as the model sees them ------------------------------------------------------

    def toolset(self, tools: Sequence[Any], *, skip_unknown: bool = False) -> ToolSet:
        """Parse tools, or find them among those parsed lately.

        `skip_unknown` leaves out tools that are no functions. Raises InvalidSchemaError.
        """
        key = msgspec.json.encode((skip_unknown, tools))
        known = self._toolsets.get(key)
        if known is None:
            known = parse_tools(list(tools), skip_unknown=skip_unknown)
            self._toolsets[key] = known
            if len(self._toolsets) > MAX_TOOLSETS:
                self._toolsets.popitem(last=False)
        else:
            self._toolsets.move_to_end(key)
        return known

    def head_of(self, session: Session) -> Head:
        settings = session.settings
        options = self.thinking_options(settings.reasoning.effort)
        return Head(settings.instructions, self.toolset(settings.tools), options)

    def thinking_options(self, effort: str | None) -> dict[str, Any]:
        """Raises ApiError for an effort that this model's template cannot express."""
        return thinking_options(effort, self.assets.chat_template.variable_names)

    def end_of(self, session: Session, log: TurnLog, new_items: Sequence[Item]) -> HistoryEnd:
        """Return where the session's history stands, for items that are to follow it."""
        last = next((r.items[-1] for r in reversed(log.records) if r.items), None)
        role = self.renderer.role_of(last, has_tokens=session.num_tokens > 0)
        if not log.is_closed:  # an answer began, even where nothing of it was kept
            role = "assistant"
        names = {call.call_id: call.name for call in session.open_calls}
        names.update({i.call_id: i.name for i in new_items if isinstance(i, FunctionCall)})
        return HistoryEnd(
            role=role,
            is_closed=log.is_closed,
            call_names=names,
        )

    def first_records(
        self, head: Head, items: Sequence[Item], *, rewritten: str = ""
    ) -> tuple[Record, ...]:
        """Render the start of a history: its head, and items that stand in it from the start."""
        records: list[Record] = []
        fingerprint = self.assets.fingerprint
        head_ids = self.renderer.render_head(head)
        if head_ids:
            records.append(
                items_record(
                    (), revision=0, token_ids=head_ids, kind=PRELUDE, model_fingerprint=fingerprint
                )
            )
        if items:
            names = {i.call_id: i.name for i in items if isinstance(i, FunctionCall)}
            role = self.renderer.role_of(None, has_tokens=bool(head_ids))
            rendered = self.renderer.render_turn(
                HistoryEnd(role=role, call_names=names), items, head, add_generation_prompt=False
            )
            records.append(
                items_record(
                    items,
                    revision=0,
                    token_ids=rendered.token_ids,
                    item_token_ends=rendered.item_token_ends,
                    model_fingerprint=fingerprint,
                )
            )
        if rewritten:
            params = {REPORT: {"rewritten": rewritten}}
            records = [replace(record, params=params) for record in records]
        return tuple(records)

    async def check_quota(self, tenant: str, *, new_sessions: int = 0) -> None:
        """Raise QuotaExceeded if the tenant may not add sessions, or any token at all."""
        quota = await self.quota_of(tenant)
        if quota.max_tokens or (quota.max_sessions and new_sessions):
            usage = await self.store.tenant_usage(tenant)
            check_quota(quota, usage, new_sessions=new_sessions)

    async def quota_of(self, tenant: str) -> TenantQuota:
        """The limits that count for a tenant, as old as a few seconds at most."""
        known = self._quotas.get(tenant)
        if known is not None and time.monotonic() - known[1] < QUOTA_FRESH_S:
            return known[0]
        quota = effective_quota(self.config.sessions, await self.store.get_quota(tenant))
        self._quotas[tenant] = (quota, time.monotonic())
        return quota

    async def set_quota(self, tenant: str, quota: TenantQuota | None) -> None:
        """Give a tenant limits of its own, or (None) those of all. Raises: SettingError."""
        validate_quota(quota or TenantQuota())
        await self.store.set_quota(tenant, quota)
        self._quotas.pop(tenant, None)

    async def adopt_model(self, session: Session) -> Session:
        """Render the history anew if it was made by another model, tokenizer or template.

        Raises: ApiError model_changed where the session was created with strict_model.
        """
        if session.model_fingerprint in ("", self.assets.fingerprint):
            return session
        if session.settings.strict_model:
            raise ApiError("model_changed", "the model of this session changed (strict_model)")
        log = await self.store.read_log(session)
        records = self.first_records(self.head_of(session), log.items, rewritten=MODEL_CHANGED)
        moved, own = replace_history(
            session,
            log,
            records,
            self.clock_ms(),
            model_fingerprint=self.assets.fingerprint,
        )
        logger.warning("history rendered anew: model changed", extra={"session_id": session.id})
        return await self.store.replace_history(moved, own)

    def salt_of(self, tenant: str) -> str:
        """Prefixes are shared within a tenant only."""
        return "" if tenant == DEFAULT_TENANT else tenant

    # Answers ------------------------------------------------------------------------------

    def reasoning_of(self, prompt: bytes) -> Reasoning:
        """Return what the end of a rendered prompt says about reasoning."""
        tool_format = self.renderer.tool_format
        if tool_format.reasoning is None:
            return "off"
        tail = decode_ids(prompt[-REASONING_TAIL * TOKEN_BYTES :])
        text = self.assets.tokenizer.decode(tail, with_control=True)
        return reasoning_of_prompt(tool_format, text)

    def answer_reader(
        self,
        turn_id: str | None,
        toolset: ToolSet,
        choice: ToolChoice,
        stop: Sequence[str],
        reasoning: Reasoning = "off",
        *,
        call_prefix: str = CALL_PREFIX,
    ) -> AnswerReader:
        """Return a reader; with a turn's id, the ids of calls follow from it."""
        numbers = itertools.count()

        def call_id() -> str:
            if turn_id is None:
                return new_call_id(call_prefix)
            return derived_id("call", turn_id, next(numbers))

        parser = StreamParser(
            self.renderer.tool_format,
            toolset,
            choice,
            reasoning_open=reasoning == "on",
            call_id_factory=call_id,
        )
        return AnswerReader(
            tokenizer=self.assets.tokenizer,
            eos_ids=frozenset(self.assets.eos_ids),
            parser=parser,
            stop_strings=stop,
            shown_control=self.grammars.markers.token_ids,
            closing_ids=self.assets.chat_template.ends.replacements(self.assets.eos_ids),
        )

    def response_events(self, turn_id: str, toolset: ToolSet) -> ResponseEvents:
        return ResponseEvents(turn_id, toolset)


def tool_format_of(assets: TextAssets) -> ToolFormat:
    """Return the tool format of a model: its template's, else what its loader recognised.

    The loader knows some models by name whose template says nothing of tools.
    """
    by_template = guess_format(assets.chat_template.source)
    says_tools = by_template is not DEFAULT_FORMAT or assets.chat_template.supports_tools
    if not says_tools and assets.tool_format in format_names():
        return get_format(str(assets.tool_format))
    return by_template


def read_owner(state_dir: Path) -> str:
    """Return the name of the API process that lives in `state_dir`, given at its first start.

    Raises: OSError.
    """
    path = state_dir / "owner"
    if not path.exists():
        state_dir.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{secrets.token_hex(4)}")
        fresh.write_text(secrets.token_hex(8))
        fresh.replace(path)
    return path.read_text().strip()


def engine_patience_s(hang_s: float) -> float:
    """How long turns wait for an engine that says nothing: until the supervisor has found out that
    it hangs, and another one has loaded."""
    return hang_s + RELOAD_S


def build_services(config: ApplianceConfig, assets: TextAssets | None = None) -> Services:
    """Construct everything; nothing is connected yet. Loads the model's text side if not given."""
    if assets is None:
        assets = load_text_assets(config.engine.model, load_format=config.engine.load_format)
    tool_format = tool_format_of(assets)
    server = config.server
    client = EngineClient(config.engine.socket_path, dead_after_s=engine_patience_s(server.hang_s))
    hub = SessionHub()
    return Services(
        config=config,
        assets=assets,
        renderer=PromptRenderer(assets, tool_format),
        store=ObservedStore(build_store(config.sessions), hub.tell),
        hub=hub,
        client=client,
        grammars=GrammarCompiler(
            client,
            tool_format,
            config.engine.grammar.budget_ms,
            control_markers(assets, tool_format),
        ),
        journals=EventJournals(server.state_dir / "turns", server.replay_minutes * 60),
        metrics=Metrics(lambda: read_state(server.run_dir)),
        admin_key=read_admin_key(server.run_dir),
        owner=read_owner(server.state_dir),
        recall=Recall(
            journal=RecallJournal(directory=server.state_dir / "recall", model=assets.fingerprint)
        ),
    )
