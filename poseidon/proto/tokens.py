"""Scans prototxt text: its tokens with their places, and the settings that they form.

Law: this scanner never fails. What is no legal token becomes a token of one character, and the
reader of the tokens decides. It splits text as `google.protobuf.text_format` does, so that both
agree on where a thing is.
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


class Token(NamedTuple):
    """One token and its place; line and column count from 1. The token at the end of the text is empty.

    A tuple and no dataclass: a net of 7000 lines has 20,000 of them.
    """

    text: str
    line: int
    column: int
    is_word: bool


class Setting(NamedTuple):
    """A setting at its place: the names of the blocks around it and its own, outermost first."""

    path: tuple[str, ...]
    line: int


def scan(text: str) -> Iterator[Token]:
    """The tokens of `text` without spaces and comments, and at last one empty token for the end."""
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
    """`text` with each comment changed, which begins with its `#`."""
    return _TOKEN.sub(lambda match: change(match[0]) if match[0].startswith("#") else match[0], text)


def settings(text: str) -> Iterator[Setting]:
    """Every setting of `text` in order, blocks and values alike, as path and line.

    A list of blocks, `layer: [{...}, {...}]`, gives one setting for each of its blocks.
    Text that does not parse gives what can be told of it.
    """
    outer: list[tuple[str, bool]] = []
    path: tuple[str, ...] = ()
    name, in_list, told = "", False, False
    previous = ""
    for token in scan(text):
        if token.is_word and not in_list and previous != ":":
            name, told = token.text, True
            yield Setting((*path, name), token.line)
        elif token.text == "[":
            in_list = True
        elif token.text == "]":
            in_list = False
        elif token.text in ("{", "<"):
            if not told:
                yield Setting((*path, name), token.line)
            outer.append((name, in_list))
            path = (*path, name)
            in_list, told = False, False
        elif token.text in ("}", ">") and outer:
            name, in_list = outer.pop()
            path, told = path[:-1], False
        previous = token.text
