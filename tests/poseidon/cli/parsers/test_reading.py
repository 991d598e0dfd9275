"""Words of a command line and a table of flags give values, or one sentence."""

from __future__ import annotations

import shlex

import pytest

from poseidon.cli.parsers.reading import HelpWanted, Mistake, read
from poseidon.flags.flag import Flag, Takes
from poseidon.flags.values import count, whole

FLAGS = (
    Flag(name="net", text="a net", metavar="FILE", required=True, aliases=("n",)),
    Flag(name="level", text="a level", read=whole, default=0),
    Flag(name="set", text="fields", takes=Takes.VALUES, default=(), dest="fields"),
    Flag(name="on_top", text="a switch", takes=Takes.SWITCH, default=False),
    Flag(name="old", note="--old has no effect here"),
)
FIRST = Flag(name="first", text="one", metavar="FIRST", takes=Takes.WORD)
MAYBE = Flag(name="maybe", text="one or none", metavar="MAYBE", takes=Takes.OPTIONAL_WORD)
LAST = Flag(name="last", text="one", metavar="LAST", read=count, takes=Takes.WORD)
MANY = Flag(name="many", text="any", metavar="MANY", takes=Takes.WORDS)
REST = Flag(name="rest", text="all", metavar="...", takes=Takes.REST)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--net=a", {"net": "a", "level": 0, "fields": (), "on_top": False, "notes": []}),
        ("-net a -level -1", {"net": "a", "level": -1}),
        ("-n=a --level=2 --level 3", {"level": 3}),
        ("--net=a --set= --set a=b --set=c", {"net": "a", "fields": ("", "a=b", "c")}),
        ("--net a --on-top", {"on_top": True}),
        ("--net a -on-top=False", {"on_top": False}),
        ("--on_top --noon_top --net -", {"on_top": False, "net": "-"}),
        ("--old 1 --net a --old=2", {"notes": ["--old has no effect here"]}),
    ],
)
def test_flags(words: str, expected: dict[str, object]) -> None:
    values = read(FLAGS, words.split())
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("places", "words", "expected"),
    [
        ((FIRST, MAYBE, LAST), "a 1", {"first": "a", "maybe": None, "last": 1}),
        ((FIRST, MAYBE, LAST), "a b --level=1 2", {"first": "a", "maybe": "b", "last": 2}),
        ((MANY,), "", {"many": ()}),
        ((FIRST, MANY), "a b --level 4 c", {"first": "a", "many": ("b", "c"), "level": 4}),
        ((FIRST, REST), "--level=2 -- -a-b --level=3", {"first": "-a-b", "rest": ("--level=3",)}),
        ((FIRST, REST), "--level=2 a --level=3 -- b", {"level": 2, "rest": ("--level=3", "--", "b")}),
    ],
)  # fmt: skip
def test_arguments(places: tuple[Flag, ...], words: str, expected: dict[str, object]) -> None:
    values = read((*FLAGS[1:], *places), words.split())
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("places", "words", "says"),
    [
        ((), "", "--net is missing"),
        ((FIRST, MAYBE, LAST), "", "FIRST and LAST are missing"),
        ((), "--net", "--net: expected a value"),
        ((), "--net --level=1", "--net: expected a value"),
        ((), "--net=", "--net: the value is empty; is a variable not set?"),
        ((FIRST, MAYBE), "--net=a b ''", "MAYBE: the value is empty; is a variable not set?"),
        ((MANY,), "--net=a ''", "MANY: the value is empty; is a variable not set?"),
        ((), "--net=a --level=x", "--level: expected a whole number, found 'x'"),
        ((), "--net=a b", "did not expect 'b'; did you mean --net=b?"),
        ((FIRST,), "--net=a b c d", "did not expect 'c d'; did you mean --net=c?"),
        ((LAST,), "--net=a b", "LAST: expected a whole number, 0 or more, found 'b'"),
        ((), "--lever=1", "unknown flag --lever; did you mean --level?"),
        ((), "--lev=1", "unknown flag --lev; did you mean --level?"),
        ((), "--nolevel", "unknown flag --nolevel; did you mean --level?"),
        ((), "--noon_top=1", "--noon_top: expected true or false, found '1'"),
        ((), "--old=1 --olt", "unknown flag --olt"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(
    places: tuple[Flag, ...], words: str, says: str
) -> None:
    with pytest.raises(Mistake) as mistake:
        read((*FLAGS, *places), shlex.split(words))
    assert str(mistake.value) == says


def test_help_needs_nothing_else() -> None:
    with pytest.raises(HelpWanted):
        read(FLAGS, ["-h"])
