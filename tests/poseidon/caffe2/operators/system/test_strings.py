"""Tensors of strings, Print, Assert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import run

X = np.array([b"abcd", b"cd", b""], dtype=object)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("StringPrefix", {"length": 2}, [b"ab", b"cd", b""]),
        ("StringSuffix", {"length": 3}, [b"bcd", b"cd", b""]),
        ("StringStartsWith", {"prefix": "ab"}, [True, False, False]),
        ("StringEndsWith", {"suffix": "cd"}, [True, True, False]),
        ("StringEquals", {"text": "cd"}, [False, True, False]),
        ("StringJoin", {"delimiter": "-"}, [b"abcd-", b"cd-", b"-"]),
        ("StringJoin", {"axis": 1}, [b"abcd,cd,,"]),
    ],
)
def test_strings(kind: str, arguments: dict[str, Any], expected: list[Any]) -> None:
    assert run(kind, [X], **arguments)[0].tolist() == expected


def test_numbers_are_joined() -> None:
    assert run("StringJoin", [np.array([[1, 2.5], [3, 4]], "f4")])[0].tolist() == [
        b"1,2.5,",
        b"3,4,",
    ]


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    run("Print", [np.arange(5)], 0, limit=3)
    assert capsys.readouterr().err == "Tensor x0 (5): 0,1,2\n"


def test_assert() -> None:
    run("Assert", [np.array([True])], 0)
    with pytest.raises(RuntimeError, match="it is false"):
        run("Assert", [np.array([True, False])], 0, error_msg="it is false")


def test_conditional_and_time() -> None:
    rows = run("Conditional", [np.array([True, False]), np.ones((2, 2)), np.zeros((2, 2))])[0]
    assert rows.tolist() == [[1, 1], [0, 0]]
    assert run("WallClockTime", [])[0] > 10**18


def test_a_net_feeds_a_string() -> None:
    (text,) = run("FeedBlob", [], value="made in the net")
    assert text == b"made in the net"
    with pytest.raises(RuntimeError, match="the argument value is not a string"):
        run("FeedBlob", [], value=3)
