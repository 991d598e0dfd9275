"""Tensors of strings, Print, Assert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.schema import Scalar, Struct
from poseidon.caffe2.text_file_reader import TextFileReader
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
    (joined,) = run("StringJoin", [np.array([[1, 2.5], [3, 4]], "f4")])
    assert joined.tolist() == [b"1,2.5,", b"3,4,"]


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    run("Print", [np.arange(5)], 0, limit=3)
    assert capsys.readouterr().err == "Tensor x0 (5): 0,1,2\n"
    net = core.Net("printing")
    net.Print([net.ConstantFill([], "x", shape=[1])], [], every_n=2)
    workspace.CreateNet(net)
    workspace.RunNet(net, 3)
    assert capsys.readouterr().err == "Tensor x (1): 0.0\n" * 2


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


SCHEMA = Struct(("name", Scalar(dtype=str)), ("value", Scalar(dtype=np.float32)))


def opened(path: Path, passes: int = 1, batch_size: int = 2) -> TextFileReader:
    workspace.ResetWorkspace()
    net = core.Net("open")
    reader = TextFileReader(net, str(path), SCHEMA, num_passes=passes, batch_size=batch_size)
    workspace.RunNetOnce(net)
    return reader


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_all_lines_of_all_passes_are_read(tmp_path: Path, passes: int, batch_size: int) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a\t1.5\nb\t-2\nc\t3e2\n")
    reader = opened(path, passes, batch_size)
    net = core.Net("read")
    stop, record = reader.read_record(net)
    names: list[bytes] = []
    values: list[float] = []
    for _ in range(-(-3 * passes // batch_size)):
        workspace.RunNetOnce(net)
        assert not workspace.FetchBlob(stop)
        names += workspace.FetchBlob(record.name()).tolist()
        values += workspace.FetchBlob(record.value()).tolist()
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(stop)
    assert names == [b"a", b"b", b"c"] * passes
    assert values == [1.5, -2, 300] * passes


@pytest.mark.parametrize(
    ("text", "message"),
    [("a\n", "line 1 .* has 1 fields, 2 are expected"), ("a\tb\n", "not a number")],
)
def test_a_malformed_line_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lines.txt"
    path.write_text(text)
    net = core.Net("read")
    opened(path).read_record(net)
    with pytest.raises(RuntimeError, match=message):
        workspace.RunNetOnce(net)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Cannot open the text file .*nothing\.txt"):
        opened(tmp_path / "nothing.txt")
