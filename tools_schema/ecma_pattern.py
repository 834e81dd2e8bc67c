# SPDX-License-Identifier: Apache-2.0
"""Owns rewriting an ECMA-262 `pattern` into the regex dialect of the grammar.

Does not know: schemas. A JSON Schema pattern may match anywhere; the grammar's must match the
whole string, and can hold no quote, backslash or control character. What cannot be rewritten
exactly (or could never be written) is refused: then the grammar leaves the pattern out.
Source: ECMA-262 section 22.2.1 (patterns), without lookaround, back references and properties.
"""

from __future__ import annotations

from dataclasses import dataclass

# Counted repeats cost compile time (0.01 s a copy of a broad class, 49k vocabulary, 2 cores) and
# over 128 the grammar engine fails: from here on a count is held as "any number".
_MAX_REPEAT = 64
_MAX_BROAD_REPEAT = 16
_MAX_LENGTH = 2_000
_ANY = ".*"
# ECMA's \s; the grammar's own \s is ASCII only, and a string can hold no raw control character.
_SPACE = r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_UNWRITABLE = frozenset('"\\') | frozenset(map(chr, range(0x20)))
_SYNTAX = frozenset(r"\^$.|?*+()[]{}/-")


class UnsupportedPatternError(Exception):
    """The grammar cannot hold this pattern (never leaves the room)."""


@dataclass(frozen=True, slots=True)
class RewrittenPattern:
    """`is_exact` False: high repeat counts are held as "any number"."""

    regex: str
    is_exact: bool


def rewrite_pattern(pattern: str) -> RewrittenPattern:
    """A regex for the whole string that matches what `pattern` finds a match in.

    Strings with quotes, backslashes or control characters are left out: an exact result is never
    looser than `pattern`. Raises UnsupportedPatternError.
    """
    if len(pattern) > _MAX_LENGTH:
        raise UnsupportedPatternError("the pattern is too long")
    reader = _Reader(pattern)
    branches = reader.alternatives(is_top=True)
    regex = branches[0] if len(branches) == 1 else "|".join(f"({b})" for b in branches)
    return RewrittenPattern(regex, reader.is_exact)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._pos = 0
        self._repeats = 1
        self._is_broad = False
        self.is_exact = True

    def alternatives(self, *, is_top: bool) -> list[str]:
        branches = [self._branch(is_top=is_top)]
        while self._peek() == "|":
            self._pos += 1
            branches.append(self._branch(is_top=is_top))
        if is_top and self._pos < len(self._text):
            raise UnsupportedPatternError("a ) without its (")
        return branches

    def _branch(self, *, is_top: bool) -> str:
        parts: list[str] = []
        starts, ends = not is_top, not is_top
        if is_top and self._peek() == "^":
            self._pos += 1
            starts = True
        while (char := self._peek()) not in ("", "|", ")"):
            if is_top and char == "$" and self._peek(1) in ("", "|"):
                self._pos += 1
                ends = True
                break
            parts.append(self._quantified())
        return ("" if starts else _ANY) + "".join(parts) + ("" if ends else _ANY)

    def _quantified(self) -> str:
        """An atom and its quantifier; what is repeated inside is repeated that often again."""
        outer, self._repeats = self._repeats, 1
        outer_broad, self._is_broad = self._is_broad, False
        atom = self._atom()
        quantifier = self._quantifier()
        self._repeats = max(self._repeats, outer)
        self._is_broad |= outer_broad
        return atom + quantifier

    def _quantifier(self) -> str:
        char = self._peek()
        if char in ("*", "+", "?"):
            self._pos += 1
            found = char
        elif char == "{":
            found = self._counted()
        else:
            return ""
        if self._peek() == "?":  # lazy or not, the same strings match
            self._pos += 1
        return found

    def _counted(self) -> str:
        end = self._text.find("}", self._pos)
        low, comma, high = self._text[self._pos + 1 : max(end, 0)].partition(",")
        if end < 0 or not low.isdigit() or (high and not high.isdigit()):
            raise UnsupportedPatternError("a { that is no quantifier")
        self._pos = end + 1
        most = _MAX_BROAD_REPEAT if self._is_broad else _MAX_REPEAT
        if self._repeats * max(int(low), int(high or 0)) > most:
            self.is_exact = False
            return "*" if int(low) == 0 else "+"
        self._repeats *= max(int(low), int(high or 0), 1)
        return f"{{{low}{comma}{high}}}"

    def _atom(self) -> str:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            self._is_broad = True
            return "."
        if char == "\\":
            return self._escape()
        if char in "^$*+?{":
            raise UnsupportedPatternError(f"{char} in this place")
        return _literal(char)

    def _group(self) -> str:
        if self._peek() == "?":
            if self._peek(1) != ":":
                raise UnsupportedPatternError("lookaround or a named group")
            self._pos += 2
        inner = self.alternatives(is_top=False)
        if self._take() != ")":
            raise UnsupportedPatternError("a ( without its )")
        if any(not branch for branch in inner):
            raise UnsupportedPatternError("an empty alternative")
        return f"({'|'.join(inner)})"

    def _escape(self) -> str:
        char = self._take()
        self._is_broad |= char in "DWS"
        if char in "dDwW":
            return f"\\{char}"
        if char in "sS":
            return f"[{'^' if char == 'S' else ''}{_SPACE}]"
        return _literal(self._escaped_char(char))

    def _escaped_char(self, char: str) -> str:
        """The character that an escape other than a class stands for."""
        if char in ("u", "x"):
            size = 4 if char == "u" else 2
            digits = self._text[self._pos : self._pos + size]
            if len(digits) != size or any(d not in "0123456789abcdefABCDEF" for d in digits):
                raise UnsupportedPatternError("an escape without its digits")
            self._pos += size
            code = int(digits, 16)
            if 0xD800 <= code < 0xE000:
                raise UnsupportedPatternError("a surrogate")
            return chr(code)
        if char in "tnrvf0":
            return {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}[char]
        if char == "" or char.isalnum():
            raise UnsupportedPatternError(f"the escape \\{char}")
        return char

    def _class(self) -> str:
        is_negated = self._peek() == "^"
        if is_negated:
            self._pos += 1
            self._is_broad = True
        parts: list[str] = []
        while self._peek() != "]":
            parts.append(self._class_item())
        self._pos += 1
        kept = [part for part in parts if part]
        if not kept and not is_negated:
            raise UnsupportedPatternError("characters that the grammar's strings cannot hold")
        if not kept:
            return "."
        return f"[{'^' if is_negated else ''}{''.join(kept)}]"

    def _class_item(self) -> str:
        """One member of a class; empty where no string of the grammar could hold it."""
        low = self._class_char()
        if len(low) > 1:
            return low
        if self._peek() != "-" or self._peek(1) in ("]", ""):
            return "" if low in _UNWRITABLE else _literal(low)
        self._pos += 1
        high = self._class_char()
        if len(high) > 1 or ord(high) < ord(low):
            raise UnsupportedPatternError("a range without its end")
        return f"{_class_code(low)}-{_class_code(high)}"

    def _class_char(self) -> str:
        char = self._take()
        if char != "\\":
            return char
        escape = self._take()
        if escape in "dwDW":
            if escape in "DW":
                raise UnsupportedPatternError("a negated class inside a class")
            return f"\\{escape}"
        if escape == "s":
            return _SPACE
        if escape == "S":
            raise UnsupportedPatternError("a negated class inside a class")
        return "\b" if escape == "b" else self._escaped_char(escape)

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._pos + ahead : self._pos + ahead + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise UnsupportedPatternError("the pattern ends too early")
        self._pos += 1
        return char


def _literal(char: str) -> str:
    if char in _UNWRITABLE:
        raise UnsupportedPatternError("a character that the grammar's strings cannot hold")
    return f"\\{char}" if char in _SYNTAX else char


def _class_code(char: str) -> str:
    """A bound of a range: it may be unwritable itself, the range is cut by the grammar."""
    if ord(char) < 0x20:
        char = " "
    return f"\\{char}" if char in _SYNTAX or char == '"' else char
