"""glog's form, letter by letter."""

from __future__ import annotations

import io
import logging
import re
import threading
from datetime import datetime
from pathlib import Path

import pytest

from poseidon.base.glog import at, glog_head, setup


@pytest.mark.parametrize(
    ("level", "thread", "head"),
    [
        (logging.INFO, 29444, "I1126 20:40:16.031869 29444 solver.cpp:294] "),
        (logging.DEBUG, 1, "I1126 20:40:16.031869     1 solver.cpp:294] "),
        (logging.WARNING, 123456, "W1126 20:40:16.031869 123456 solver.cpp:294] "),
        (logging.ERROR, 1, "E1126 20:40:16.031869     1 solver.cpp:294] "),
        (logging.CRITICAL, 1, "F1126 20:40:16.031869     1 solver.cpp:294] "),
    ],
)
def test_head(level: int, thread: int, head: str) -> None:
    assert (
        glog_head(level, datetime(2015, 11, 26, 20, 40, 16, 31869), thread, "solver.cpp", 294)
        == head
    )


def test_stream_and_file_get_the_same_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    with setup(stream=stream, file=tmp_path / "logs" / "worker.log") as outputs:
        logging.getLogger("poseidon.solver").info("Iteration %d", 100, extra=at("solver.cpp", 294))
        logging.getLogger("ps_server.protocol.shard").warning("late")
        logging.getLogger("poseidon.solver").debug("hidden")
    outputs.close()
    logging.getLogger("poseidon.solver").info("after the end")
    lines = stream.getvalue().splitlines()
    assert (tmp_path / "logs" / "worker.log").read_text().splitlines() == lines
    thread = f"{threading.get_native_id():>5}"
    assert re.fullmatch(
        rf"I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {thread} solver\.cpp:294\] Iteration 100", lines[0]
    )
    assert re.fullmatch(rf"W\d{{4}} \S+ {thread} test_glog\.py:\d+\] late", lines[1])
    assert len(lines) == 2


def test_handlers_of_a_script_get_no_line_that_is_written_here() -> None:
    found = io.StringIO()
    handler, own = logging.StreamHandler(found), io.StringIO()
    logging.getLogger().addHandler(handler)
    try:
        with setup(stream=own), setup(stream=own):
            logging.getLogger("poseidon.x").warning("ours")
            logging.getLogger("ps_server.x").warning("ours")
        logging.getLogger("poseidon.x").warning("without outputs")
    finally:
        logging.getLogger().removeHandler(handler)
    assert own.getvalue().count("ours") == 4
    assert found.getvalue() == "without outputs\n"


def test_a_name_that_is_not_utf_8_is_escaped(tmp_path: Path) -> None:
    with setup(file=tmp_path / "log"):
        logging.getLogger("poseidon").info("no image %s", "caf\udce9.jpg")
    assert (tmp_path / "log").read_text().rstrip().endswith(r"no image caf\udce9.jpg")


def test_a_name_neither_forges_a_line_nor_moves_the_cursor(tmp_path: Path) -> None:
    stream = io.StringIO()
    with setup(stream=stream, file=tmp_path / "log"):
        logging.getLogger("poseidon").info(
            "layer %s", "a\nI1126 20:40:16.0 1 x:1] forged\x1b[2J\r\x9b"
        )
    text = stream.getvalue()
    assert (tmp_path / "log").read_text() == text
    assert text.count("\n") == 1
    assert text.rstrip().endswith(r"layer a\nI1126 20:40:16.0 1 x:1] forged\x1b[2J\r\x9b")


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_that_has_gone_gets_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with setup(stream=Gone()):
        logging.getLogger("poseidon").info("line")
    assert capsys.readouterr() == ("", "")


def test_a_disk_that_is_full_is_told_once() -> None:
    stream = io.StringIO()
    with setup(stream=stream, file=Path("/dev/full")):
        for number in range(3):
            logging.getLogger("poseidon.solver").info("line %d", number)
    texts = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    told = (
        "the log /dev/full cannot be written: No space left on device; the job continues without it"
    )
    assert sorted(texts) == ["line 0", "line 1", "line 2", told]


def test_a_traceback_follows() -> None:
    stream = io.StringIO()
    with setup(stream=stream):
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("poseidon").exception("failed")
    assert stream.getvalue().splitlines()[0].endswith("] failed")
    assert stream.getvalue().splitlines()[-1] == "ValueError: x"
