"""A scanner for prototxt text: tokens and settings with their line numbers.

Law: the scanner never fails. A character that starts no legal token becomes a token. It splits text
as `google.protobuf.text_format` does, so that both report the same locations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
      (?P<word>   [^\d\W]\w* )
    | (?P<number> (?:[0-9+-]|\.[0-9])[0-9a-zA-Z_.+-]* )
    | (?P<string> "[^"\n\\]*(?:\\.[^"\n\\]*)*(?:"|\\?$) | '[^'\n\\]*(?:\\.[^'\n\\]*)*(?:'|\\?$) )
    | (?P<space>  \s+ | \#[^\n]* )
    | (?P<other>  . )
    """,
    re.VERBOSE | re.MULTILINE,
)

_DEEPEST = 64
"""Blocks in a path: paths of any length take a time that grows with the square of the text's."""


class Token(NamedTuple):
    """A token and its location; line and column count from 1.

    The token at the end of the text is empty.

    A tuple and not a dataclass, for speed: a net of 7000 lines has 20,000 tokens.
    """

    text: str
    line: int
    column: int
    is_word: bool


class Setting(NamedTuple):
    """A setting and its line.

    `path` has the names of the blocks around it and its own, outermost first; of blocks deeper than
    any definition has, the outer ones.
    """

    path: tuple[str, ...]
    line: int


def scan(text: str) -> Iterator[Token]:
    """Yield the tokens of `text` without spaces and comments, and an empty token at the end."""
    line, line_start = 1, 0
    for match in _TOKEN.finditer(text):
        kind, found = match.lastgroup, match.group()
        if kind != "space":
            yield Token(found, line, match.start() - line_start + 1, kind == "word")
        elif "\n" in found:
            line += found.count("\n")
            line_start = match.start() + found.rindex("\n") + 1
    yield Token("", line, len(text) - line_start + 1, False)


def map_comments(text: str, change: Callable[[str], str]) -> str:
    """Return `text` with each comment, including its `#`, replaced by `change(comment)`."""
    return _TOKEN.sub(
        lambda match: change(match[0]) if match[0].startswith("#") else match[0], text
    )


def settings(text: str) -> Iterator[Setting]:
    """Yield every setting of `text` in order, blocks and values alike.

    A list of blocks, `layer: [{...}, {...}]`, yields one setting for each block. Text that does not
    parse yields the settings that can be recognized.
    """
    outer: list[tuple[str, bool]] = []
    path: tuple[str, ...] = ()
    name, in_list, emitted = "", False, False
    previous = ""
    for token in scan(text):
        if token.is_word and not in_list and previous != ":":
            name, emitted = token.text, True
            yield Setting((*path, name), token.line)
        elif token.text == "[":
            in_list = True
        elif token.text == "]":
            in_list = False
        elif token.text in ("{", "<"):
            if not emitted:
                yield Setting((*path, name), token.line)
            outer.append((name, in_list))
            if len(path) < _DEEPEST:
                path = (*path, name)
            in_list, emitted = False, False
        elif token.text in ("}", ">") and outer:
            name, in_list = outer.pop()
            path, emitted = path[: len(outer)], False
        previous = token.text
