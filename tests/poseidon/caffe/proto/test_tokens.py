"""The scanner: places of tokens, and settings by path."""

from __future__ import annotations

import random

import pytest

from poseidon.caffe.proto.tokens import scan, settings


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "@1:1"),
        ("a: 1", "a@1:1 :@1:2 1@1:4 @1:5"),
        ("# only a comment\n", "@2:1"),
        ("a # b: {\nc", "a@1:1 c@2:1 @2:2"),
        ("a\r\n  b", "a@1:1 b@2:3 @2:4"),
        ("\ta", "a@1:2 @1:3"),
        ('"a # \\" {"x', '"a # \\" {"@1:1 x@1:11 @1:12'),
        ("'it' \"is\"", "'it'@1:1 \"is\"@1:6 @1:10"),
        ('"open\nb', '"open@1:1 b@2:1 @2:2'),
        ("-1.5e-3f .5 +2", "-1.5e-3f@1:1 .5@1:10 +2@1:13 @1:15"),
        ("a{b:1}", "a@1:1 {@1:2 b@1:3 :@1:4 1@1:5 }@1:6 @1:7"),
    ],
)
def test_tokens_and_their_places(text: str, expected: str) -> None:
    found = " ".join(f"{token.text}@{token.line}:{token.column}" for token in scan(text))
    assert found == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("name: 'n'\nlayer {\n type: 'T' "
"}", [(("name",), 1), (("layer",), 2), (("layer", "type"), 3)]),
        ("pool: MAX stride: 2", [(("pool",), 1), (("stride",), 1)]),
        ("a: [X, Y], b: 1", [(("a",), 1), (("b",), 1)]),
        ("layer: [{\n n: 1 },\n { n: 2 }]\nx: 1",
         [(("layer",), 1), (("layer", "n"), 2), (("layer",), 3), (("layer", "n"), 3), (("x",), 4)]),
        ("layer <\n a { b: 1 } >\nlayer\n{ "
"}", [(("layer",), 1), (("layer", "a"), 2), (("layer", "a", "b"), 2), (("layer",), 3)]),
        ('# layer {\na: "layer {"', [(("a",), 2)]),
        ("} } a: 1", [(("a",), 1)]),
    ],
)  # fmt: skip
def test_settings_by_path(text: str, expected: list[tuple[tuple[str, ...], int]]) -> None:
    assert [(setting.path, setting.line) for setting in settings(text)] == expected


def test_no_text_stops_the_scanner() -> None:
    generator = random.Random(7)
    for _ in range(300):
        text = "".join(generator.choices("a1\"'{}<>[]:,;#\\-.\n\t é\x00", k=40))
        tokens = list(scan(text))
        assert tokens[-1].text == ""
        lines = text.split("\n")
        for token in tokens[:-1]:
            assert lines[token.line - 1][token.column - 1 :].startswith(token.text)
        list(settings(text))
