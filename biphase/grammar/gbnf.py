"""Grammars in GBNF (llama.cpp's EBNF, what vLLM's `grammar` field takes) as Lark text for llguidance.

A recursive descent over the text; errors say line and what was expected. Rules without recursion become terminals:
they are lexed by automata, which is far cheaper than parsing, and a terminal knows all its ways at once, while a parser
rule has to take the longest match of each of its terminals.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from biphase.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NUMBER = re.compile(r"[0-9]{1,9}")
_BLANK = re.compile(r"(?:[ \t]+|#[^\n]*)*")
_BLANK_LINES = re.compile(r"(?:\s+|#[^\n]*)*")
_RULE_START = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*[ \t]*::=")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_DEPTH = 100


def is_lark(text: str) -> bool:
    """Whether the text is Lark's form already."""
    return re.search(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))", text) is not None


def to_lark(text: str) -> str:
    """
    Raises:
        InvalidRequestError: it does not parse, names a rule that is not there, or has no `root`.
    """
    return _Reader(text).read()


@dataclass(slots=True)
class _Rule:
    body: str = ""
    # Rules it refers to.
    uses: set[str] = field(default_factory=set)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._rule = _Rule()

    def read(self) -> str:
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")
            self._skip(_BLANK)
            self._expect("::=")
            if name in self._rules:
                raise self._error(f"rule {name!r} stands there twice")
            self._rule = self._rules[name] = _Rule()
            self._skip(_BLANK_LINES)
            self._rule.body = self._alternatives(0)
            self._skip(_BLANK_LINES)
        return self._lark()

    def _lark(self) -> str:
        if "root" not in self._rules:
            raise InvalidRequestError("the grammar has no rule named root")
        for name, rule in self._rules.items():
            for used in rule.uses - self._rules.keys():
                raise InvalidRequestError(f"the grammar's rule {name!r} uses {used!r}, which is not there"[:300])
        terminals = self._terminals()
        # Numbered, so that no two names fall together in Lark's spelling (terminals in capitals).
        names = {name: f"T{number}" if name in terminals else f"r{number}" for number, name in enumerate(self._rules)}
        lines = ["%llguidance {}", f"start: {names['root']}"]
        for name, rule in self._rules.items():
            body = re.sub("\0([^\0]+)\0", lambda found: names[found[1]], rule.body)
            lines.append(f"{names[name]}: {body}")
        return "\n".join(lines) + "\n"

    def _terminals(self) -> set[str]:
        """Rules from which no rule can be reached that leads back to itself."""
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        waiting = {name: len(rule.uses) for name, rule in self._rules.items()}
        for name, rule in self._rules.items():
            for used in rule.uses:
                users[used].append(name)
        ready = [name for name, count in waiting.items() if not count]
        terminals: set[str] = set()
        while ready:
            name = ready.pop()
            terminals.add(name)
            for user in users[name]:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)
        return terminals

    def _alternatives(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise self._error("groups are nested too deeply")
        parts = [self._sequence(depth)]
        while self._take("|"):
            self._skip(_BLANK_LINES)
            parts.append(self._sequence(depth))
        return " | ".join(parts)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while (item := self._item(depth)) is not None:
            items.append(item + self._repetition())
            self._skip_inside(depth)
        return " ".join(items) or '""'

    def _skip_inside(self, depth: int) -> None:
        """White space within a rule: lines may break inside of groups, and before a "|"."""
        if depth:
            self._skip(_BLANK_LINES)
            return
        self._skip(_BLANK)
        found = _BLANK_LINES.match(self._text, self._at)
        assert found is not None
        if self._text[found.end() : found.end() + 1] == "|":
            self._at = found.end()

    def _item(self, depth: int) -> str | None:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._char_class()
        if char == "(":
            self._at += 1
            self._skip(_BLANK_LINES)
            inner = self._alternatives(depth + 1)
            self._skip(_BLANK_LINES)
            self._expect(")")
            return f"({inner})"
        if char == ".":
            self._at += 1
            return "/(?s:.)/"
        if _RULE_START.match(self._text, self._at):
            return None
        found = _NAME.match(self._text, self._at)
        if found is None:
            if char and char not in "|)\n\r":
                raise self._error(f"unexpected {char!r}")
            return None
        self._at = found.end()
        self._rule.uses.add(found[0])
        return f"\0{found[0]}\0"

    def _repetition(self) -> str:
        self._skip(_BLANK)
        char = self._text[self._at : self._at + 1]
        if char in ("*", "+", "?"):
            self._at += 1
            return char
        if char != "{":
            return ""
        self._at += 1
        self._skip(_BLANK)
        least = most = self._match(_NUMBER, "a number")
        self._skip(_BLANK)
        if self._take(","):
            self._skip(_BLANK)
            found = _NUMBER.match(self._text, self._at)
            most = found[0] if found else ""
            self._at = found.end() if found else self._at
            self._skip(_BLANK)
        self._expect("}")
        return f"{{{least},{most}}}"

    def _literal(self) -> str:
        self._expect('"')
        chars: list[str] = []
        while not self._take('"'):
            chars.append(self._char())
        return json.dumps("".join(chars), ensure_ascii=False)

    def _char_class(self) -> str:
        self._expect("[")
        parts = ["["]
        if self._take("^"):
            parts.append("^")
        while not self._take("]"):
            # A dash between two characters is a range, anywhere else itself.
            parts.append(_in_class(self._char()))
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                parts.append("-" + _in_class(self._char()))
        if parts[-1] in ("[", "^"):
            raise self._error("an empty set of characters")
        return f"/{''.join(parts)}]/"

    def _char(self) -> str:
        char = self._text[self._at : self._at + 1]
        if not char or char == "\n":
            raise self._error("the text ends within a string or a set of characters")
        self._at += 1
        if char != "\\":
            return char
        escape = self._text[self._at : self._at + 1]
        self._at += 1
        if escape in _PLAIN_ESCAPES:
            return _PLAIN_ESCAPES[escape]
        if escape in _HEX:
            digits = self._text[self._at : self._at + _HEX[escape]]
            self._at += _HEX[escape]
            try:
                code = int(digits, 16)
                # UTF-8 has no form for the surrogates.
                return chr(code).encode().decode()
            except (ValueError, OverflowError):
                raise self._error(f"\\{escape} needs {_HEX[escape]} digits that name a character") from None
        if escape and escape in '"\\[]-^/':
            return escape
        raise self._error(f"unknown escape \\{escape}")

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {what}")
        self._at = found.end()
        return found[0]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, token: str) -> bool:
        if self._text.startswith(token, self._at):
            self._at += len(token)
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._error(f"expected {token!r}")

    def _error(self, what: str) -> InvalidRequestError:
        line = self._text.count("\n", 0, self._at) + 1
        return InvalidRequestError(f"the grammar does not parse: line {line}: {what}"[:300])


def _in_class(char: str) -> str:
    """One character in a regular expression's set, within slashes."""
    if char in "[]\\^-/&~":
        return "\\" + char
    return char if " " <= char <= "~" else f"\\u{{{ord(char):x}}}"
