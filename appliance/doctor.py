# SPDX-License-Identifier: Apache-2.0
"""What `moorage doctor` finds in a running appliance: one line a fact, with what to do about it.

It looks at every part, and runs a canary: a prompt that is computed once must be found the second
time. Does not know: HTTP, how findings are printed.
"""

from __future__ import annotations

import contextlib
from typing import Any
from uuid import uuid4

from appliance.services import Services
from appliance.turn_watchdog import TurnWatchdog
from appliance.turns import TurnService
from engine import api
from engine.errors import EngineError, EngineUnavailableError
from sessions.errors import SessionError
from sessions.store import ListQuery
from sessions.token_codec import encode_ids

OK, WARN, FAIL = "ok", "warning", "failed"
ASK_S = 2.0
CANARY_TOKENS = 200
CANARY_SALT = "doctor"

Finding = dict[str, Any]


async def examine(services: Services, turns: TurnService, watchdog: TurnWatchdog) -> dict[str, Any]:
    """Return every finding, the worst of them as the status."""
    findings = [
        *await _store(services),
        *await _engine(services),
        *_turns(turns, watchdog),
        *_template(services),
    ]
    levels = {finding["level"] for finding in findings}
    worst = FAIL if FAIL in levels else WARN if WARN in levels else OK
    return {"object": "doctor", "status": worst, "findings": findings}


def finding(level: str, part: str, text: str, hint: str = "") -> Finding:
    """One finding; `hint` says what to do about it."""
    return {"level": level, "part": part, "text": text, **({"hint": hint} if hint else {})}


async def _store(services: Services) -> list[Finding]:
    health = await services.store.health()
    if not health.ok:
        return [finding(FAIL, "store", f"{health.kind}: {health.detail}", "turns are refused")]
    found = [finding(OK, "store", f"{health.kind}: {health.detail}")]
    found += [finding(WARN, "store", warning) for warning in health.warnings]
    try:
        page = await services.store.list_sessions(ListQuery(limit=1, status="failed"))
    except SessionError as error:
        return [*found, finding(FAIL, "store", str(error))]
    if page.sessions:
        found.append(finding(WARN, "sessions", "some sessions have failed", "moorage sessions ls"))
    return found


async def _engine(services: Services) -> list[Finding]:
    client = services.client
    hint = "look at the engine's log; it is restarted by itself"
    try:  # asked, however long it has been silent: a busy machine is no dead engine
        stats = await client.stats(timeout_s=ASK_S)
        tiers = await client.tiers(timeout_s=ASK_S)
        canary = await _canary(services)
    except EngineUnavailableError as error:
        return [finding(FAIL, "engine", f"it does not answer: {error}", hint)]
    except EngineError as error:
        return [finding(FAIL, "engine", str(error))]
    found = [finding(OK, "engine", f"{stats.get('running', 0):.0f} requests run")]
    waiting = stats.get("waiting", 0.0)
    if waiting > stats.get("running", 0.0) + 8:
        found.append(
            finding(WARN, "engine", f"{waiting:.0f} requests wait", "more load than it serves")
        )
    for tier in tiers:
        level = OK if tier.state in ("up", "off") else WARN
        reason = f": {tier.reason}" if tier.reason else ""
        found.append(finding(level, f"tier {tier.tier}", f"{tier.kind} {tier.state}{reason}"))
    return [*found, canary]


async def _canary(services: Services) -> Finding:
    """Compute a prompt nobody else has, then ask for it again."""
    ids = [token_id for token_id in range(300, 300 + CANARY_TOKENS)]
    prompt = encode_ids([i % services.assets.vocab_size for i in ids])
    salt = f"{CANARY_SALT}-{uuid4().hex}"
    found: list[int] = []
    for _ in range(2):
        request = api.GenerateRequest(
            request_id=f"doctor_{uuid4().hex}",
            token_ids=prompt,
            sampling=api.SamplingParams(max_new_tokens=1, temperature=0.0),
            salt=salt,
        )
        async with contextlib.aclosing(services.client.generate(request)) as items:
            async for item in items:
                if isinstance(item, api.Started):
                    found.append(item.cache.l1 + item.cache.l2 + item.cache.l3)
    await services.client.drop_prefix(prompt, salt=salt)
    if len(found) == 2 and found[0] == 0 and found[1] >= CANARY_TOKENS - 1:
        return finding(OK, "cache", f"a prompt computed once is found again: {found[1]} tokens")
    hint = "prefixes are not reused: a restart of the engine helps, please report it"
    return finding(FAIL, "cache", f"a prompt of {CANARY_TOKENS} tokens hit {found}", hint)


def _turns(turns: TurnService, watchdog: TurnWatchdog) -> list[Finding]:
    found = [
        finding(
            WARN,
            "turns",
            f"{stalled['turn_id']} has made no progress for {stalled['waiting_s']} s "
            f"({stalled['phase']})",
            "moorage sessions cancel",
        )
        for stalled in watchdog.stalled
    ]
    return found or [finding(OK, "turns", f"{turns.num_running} run, none is stalled")]


def _template(services: Services) -> list[Finding]:
    found = [
        finding(
            WARN if case.status == "differs" and not case.is_known else OK,
            "chat template",
            f"{case.kind}: {case.status}" + (f" ({case.detail})" if case.detail else ""),
            case.consequence,
        )
        for case in services.assets.conformance.cases
        if case.status != "equal"
    ]
    return found or [finding(OK, "chat template", "every kind of item appends as it renders")]
