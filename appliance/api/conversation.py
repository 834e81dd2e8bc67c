# SPDX-License-Identifier: Apache-2.0
"""Chat messages -> the prompt of a conversation; what this server answered in it keeps its ids.

Does not know: how a dialect spells its messages, what is asked of the model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.recall import Recalled, chain_keys, root_key
from appliance.services import Services
from appliance.text_limits import check_can_fit, num_chars, off_loop
from engine.text.errors import TemplateRenderError
from sessions.token_codec import count
from tools_schema.tool_spec import ToolSet

ChatMessage = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rendered conversation.

    keys: its `chain_keys`; an answer to it is remembered under the one that follows them.
    opening: the one of its first message that is no system's.
    num_recalled, recalled_tokens: how much of its front is ids of this server.
    """

    prompt: bytes
    keys: tuple[bytes, ...]
    opening: bytes
    num_recalled: int = 0
    recalled_tokens: int = 0


async def render_conversation(
    services: Services,
    messages: Sequence[ChatMessage],
    toolset: ToolSet,
    tenant: str,
    *,
    param: str = "messages",
    options: Mapping[str, Any] | None = None,
) -> Conversation:
    """Render a conversation; answers of this server in it keep the ids they were sampled as.

    Neighbouring system messages become one. A template that refuses one in mid-list gets it as a
    user's message: an agent's reminder is better read there than not at all. Long text is read
    beside the event loop.

    Args:
        param: the field that holds the conversation.
        options: what the template is told besides.

    Raises: TemplateRenderError where the template refuses the rest as well; ApiError naming
        `param` where so much text can never fit.
    """
    chars, room = num_chars([dict(message) for message in messages]), services.max_context_len
    check_can_fit(chars, room, services.assets.tokenizer.max_token_bytes, param)
    merged = _merged(messages, SYSTEM_ROLES)
    told = [json.dumps(options, sort_keys=True)] if options else []
    root = root_key(tenant, toolset.content_hash, *told)
    keys = await off_loop(chars, lambda: chain_keys(root, merged))
    is_head = merged[0]["role"] in SYSTEM_ROLES and len(keys) > 1
    found = services.recall.longest(keys[:-1])
    prompt = b""
    if found is not None:
        num_known, recalled = found
        new_chars = num_chars([dict(message) for message in merged[num_known:]])
        prompt = await off_loop(
            new_chars, lambda: _continued(services, merged, num_known, recalled, options)
        )
    if not prompt:
        found = None
        tool_chars = num_chars([tool.as_chat() for tool in toolset])
        prompt = await off_loop(
            chars + tool_chars, lambda: _rendered(services, merged, toolset, options)
        )
    return Conversation(
        prompt=prompt,
        keys=tuple(keys),
        opening=keys[1] if is_head else keys[0],
        num_recalled=found[0] if found is not None else 0,
        recalled_tokens=count(found[1].token_ids) if found is not None else 0,
    )


def _rendered(
    services: Services,
    messages: list[ChatMessage],
    toolset: ToolSet,
    options: Mapping[str, Any] | None,
) -> bytes:
    try:
        return services.renderer.render_chat(messages, toolset, options=options)
    except TemplateRenderError:
        if not any(message["role"] in SYSTEM_ROLES for message in messages[1:]):
            raise
    return services.renderer.render_chat(_systems_as_users(messages), toolset, options=options)


def _continued(
    services: Services,
    messages: Sequence[ChatMessage],
    num_known: int,
    recalled: Recalled,
    options: Mapping[str, Any] | None,
) -> bytes:
    """The ids of a history that was answered here, and the rest rendered; b"" if refused."""
    history, new = messages[:num_known], messages[num_known:]
    as_users = [{**m, "role": "user"} if m["role"] in SYSTEM_ROLES else m for m in new]
    for tail in (new, _merged(as_users, ("user",))):
        with contextlib.suppress(TemplateRenderError):
            rest = services.renderer.append_chat(history, tail, recalled.is_closed, options)
            return recalled.token_ids + rest
    return b""


def _systems_as_users(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    shaped = [
        {**message, "role": "user"} if index and message["role"] in SYSTEM_ROLES else message
        for index, message in enumerate(messages)
    ]
    return _merged(shaped, ("user",))


def _merged(messages: Sequence[ChatMessage], roles: Sequence[str]) -> list[ChatMessage]:
    """Join neighbours of these roles by an empty line."""
    merged: list[ChatMessage] = []
    for message in messages:
        if merged and message["role"] in roles and merged[-1]["role"] in roles:
            content = f"{merged[-1]['content']}\n\n{message['content']}"
            merged[-1] = {**merged[-1], "content": content}
        else:
            merged.append(message)
    return merged
