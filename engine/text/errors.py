# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between messages and token ids.

EngineError > TextError(ValueError)          code
  TokenizerError               tokenizer_unsupported: a tokenizer we cannot rebuild
  ChatTemplateError            template_invalid: the template does not compile
  TemplateRenderError          template_refused: the template raised on these messages
  MessageShapeError            invalid_message: a message is not what templates take
"""

from __future__ import annotations

from engine.errors import EngineError


class TextError(EngineError, ValueError):
    """Root of the tree; `code` is stable."""

    code = "text_error"


class TokenizerError(TextError):
    """The tokenizer of the model cannot be rebuilt."""

    code = "tokenizer_unsupported"


class ChatTemplateError(TextError):
    """The chat template does not compile."""

    code = "template_invalid"


class TemplateRenderError(TextError):
    """The chat template refused these messages."""

    code = "template_refused"


class MessageShapeError(TextError):
    """A message has a shape that no template takes."""

    code = "invalid_message"
