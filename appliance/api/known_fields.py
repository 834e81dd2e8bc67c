# SPDX-License-Identifier: Apache-2.0
"""Fields of the dialects that have no effect here: which are refused, which are let pass.

A field that would change the answer is refused with its name, unless its value asks for what
happens anyway; the others are let pass. Does not know: the fields that are honoured (the bodies
declare them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from appliance.errors import ApiError

HarmlessValues = Mapping[str, tuple[Any, ...]]

# What other servers take beside OpenAI's fields, with the values that ask for nothing.
_OTHER_SERVERS: Final[HarmlessValues] = {
    "add_special_tokens": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "cache_salt": (None,),
    "ebnf": (None,),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_whitespace_pattern": (None,),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "lora_path": (None,),
    "prompt_logprobs": (None, False),
    "regex": (None,),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "stop_regex": (None, []),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
}
REFUSED_CHAT: Final[HarmlessValues] = {
    **_OTHER_SERVERS,
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "separate_reasoning": (None, True),
    "suffix": (None, ""),
    "web_search_options": (None,),
}
REFUSED_COMPLETIONS: Final[HarmlessValues] = {
    **_OTHER_SERVERS,
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tools": (None, []),
}
REFUSED_MESSAGES: Final[HarmlessValues] = {
    **_OTHER_SERVERS,
    "compaction": (None,),
    "container": (None,),
    "fallbacks": (None, []),
    "mcp_servers": (None, []),
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "stop": (None, []),
}
REFUSED_RESPONSES: Final[HarmlessValues] = {
    **_OTHER_SERVERS,
    "conversation": (None,),
    "max_tool_calls": (None,),
    "n": (None, 1),
    "prompt": (None,),
    "response_format": (None, {"type": "text"}),
    "stop": (None, []),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
REFUSED_TOKENIZE: Final[HarmlessValues] = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "mm_processor_kwargs": (None, {}),
}
# Fields that other servers or OpenAI's own backend read and that cannot change our answer.
TOLERATED: Final = frozenset(
    {
        "access_programs",
        "background_options",
        "billing_policy",
        "cache_control",
        "client_metadata",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "stream_reasoning",
        "user",
        "user_profile_id",
        "verbosity",
        "workspace_id",
    }
)


def refuse_unsupported(body: BaseModel, table: HarmlessValues) -> None:
    """Raise ApiError for a field that asks for what is not supported."""
    values = body.model_extra or {}
    for name, harmless in table.items():
        if name in values and not _is_among(values[name], harmless):
            raise ApiError("unsupported_parameter", f"{name}: not supported", name)


def unknown_fields(body: BaseModel, table: HarmlessValues) -> list[str]:
    """Return the names of fields nobody knows, for the log."""
    return sorted(set(body.model_extra or ()) - TOLERATED - set(table))


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    """1 is not True here, as it is to Python."""
    return any(value == known and type(value) is type(known) for known in harmless)
