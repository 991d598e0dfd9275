"""The progress of commands: a bar on a terminal, lines where they are asked for, nothing
elsewhere.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import cv2
import pytest

from poseidon.caffe.data.prepare.convert import MNIST_FILES
from poseidon.caffe.data.staging import DOWNLOADING
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.cli.main import main
from poseidon.cli.progress_bar import LINE_S, CommandProgress, progress_bar
from poseidon.flags.flag import ShownProgress
from tests.support.databases import make_pictures, picture

NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
COMMANDS = {
    "compute_image_mean": ("compute_image_mean db", "adding up", "8/8"),
    "partition_data": ("partition_data db", "dividing", "8/8"),
    "convert_imageset": ("convert_imageset ./ list out", "converting", "3/3"),
    "convert_annoset": ("convert_annoset ./ list out", "converting", "3/3"),
    "make_db": ("make_db list out", "converting", "3/3"),
    "make_db --generate": ("make_db --generate=two_class drawn --count=4 "
"--test_count=4", "drawing two_class_val", "4/4"),
    "convert_mnist": ("convert_mnist . --folder=out", "", "2/2"),
    "convert_mnist_siamese": ("convert_mnist_siamese . --folder=out", "", "2/2"),
    "test": ("test -model net.prototxt -weights m.caffemodel -iterations 3", "testing", "3/3"),
    "time": ("time -model net.prototxt -iterations 3", "timing", "3/3"),
    "extract_features": ("extract_features m.caffemodel net.prototxt ip out 2 "
"lmdb", "extracting", "2/2"),
    "doctor": ("doctor", "asking hosts", "1/1"),
}  # fmt: skip
"""Command lines, each with what its last bar shows."""


class Tty:
    """A pseudo-terminal, and what has been drawn on it."""

    def __init__(self, columns: int = 100) -> None:
        self._leader, follower = os.openpty()
        fcntl.ioctl(
            follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
        )
        self.stream: TextIO = os.fdopen(follower, "w")
        self._drawn: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._leader, 1 << 16):
                self._drawn.append(chunk)
        except OSError:  # nobody has it open any more
            pass

    def close(self) -> str:
        """Close it and return everything that was drawn."""
        self.stream.close()
        self._reader.join()
        os.close(self._leader)
        return b"".join(self._drawn).decode()


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[list[str]]:
    """Run the block with a terminal; the list has what was drawn, after the block."""
    drawn: list[str] = []
    tty = Tty(columns)
    monkeypatch.setattr(sys, "stderr", tty.stream)
    monkeypatch.setattr(sys, "stdout", tty.stream)
    try:
        yield drawn
    finally:
        monkeypatch.undo()
        drawn.append(tty.close())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    make_pictures(tmp_path / "db", 8)
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    net = open_net(NetRequest(model=tmp_path / "net.prototxt", phase=TEST))
    write_model(tmp_path / "m.caffemodel", net.definition.param, net.layer_blobs())
    net.close()
    for number in range(3):
        cv2.imwrite(f"{number}.png", picture(number).transpose(1, 2, 0))
    (tmp_path / "list").write_text("".join(f"{number}.png {number}\n" for number in range(3)))
    for images, labels in MNIST_FILES.values():
        (tmp_path / f"{images}.gz").write_bytes(
            gzip.compress(struct.pack(">4I", 0x803, 2, 1, 1) + b"ab")
        )
        (tmp_path / f"{labels}.gz").write_bytes(
            gzip.compress(struct.pack(">2I", 0x801, 2) + b"\1\2")
        )
    yield tmp_path
    os.chdir(before)


def screen(drawn: str) -> list[str]:
    """Return the lines that are left on a terminal: a carriage return goes back to the start of
    the line.
    """
    lines = []
    for line in drawn.replace("\r\n", "\n").split("\n"):
        shown = ""
        for text in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r"):
            shown = text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_have_bars_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    command, activity, count = COMMANDS[name]
    with on_terminal(monkeypatch) as drawn:
        assert main(command.split()) == 0
    lines = screen(drawn[0])
    bars = [line for line in lines if line.startswith(activity) and f"| {count} [" in line]
    assert bars, drawn[0]
    assert "100%|" in bars[-1]
    assert all(line.count("%|") <= 1 for line in lines), (
        "two bars, or a bar and other text, are in one line"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_elsewhere_no_bar_is_drawn(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(COMMANDS[name][0].split()) == 0
    written = "".join(capfd.readouterr())
    assert "\r" not in written
    assert "%|" not in written


@pytest.mark.parametrize(
    ("shown", "bar", "batches"), [("auto", 1, 3), ("bar", 1, 0), ("lines", 0, 3)]
)
def test_what_is_shown_of_a_test(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shown: str, bar: int, batches: int
) -> None:
    words = f"test -model net.prototxt -weights m.caffemodel -iterations 3 --progress={shown}"
    with on_terminal(monkeypatch) as drawn:
        assert main(words.split()) == 0
    lines = screen(drawn[0])
    assert sum(line.startswith("testing: 100%|") for line in lines) == bar
    assert sum("] Batch " in line for line in lines) == batches
    assert [line.partition("] ")[2][:5] for line in lines if "] Loss: " in line] == ["Loss:"], (
        "results are shown"
    )


def test_a_real_process_on_a_terminal(folder: Path) -> None:
    tty = Tty()
    done = subprocess.run(
        [sys.executable, "-m", "poseidon", "compute_image_mean", "db"],
        stdin=subprocess.DEVNULL, stdout=tty.stream, stderr=tty.stream, check=False,
    )  # fmt: skip
    lines = screen(tty.close())
    assert done.returncode == 0, lines
    assert lines[0] == "Processed 8 files."
    assert lines[1].startswith("adding up: 100%|")
    assert lines[2].startswith("mean_value channel [0]: ")


def test_each_activity_has_a_bar_and_prints_appear_above(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as drawn, progress_bar("auto") as report:
        report(DOWNLOADING, 1024, 2048)
        report(DOWNLOADING, 2048, 2048)
        report("writing", 1, 5)
        print("half a", end=" ")
        print("line")
        report("writing", 5, 5)
        print("the rest", end="")
    lines = screen(drawn[0])
    assert lines[0].startswith("downloading: 100%|")
    assert "2.00k/2.00k" in lines[0]
    assert lines[1] == "half a line"
    assert lines[2].startswith("writing: 100%|")
    assert "5/5" in lines[2]
    assert lines[3] == "the rest"


def test_a_terminal_without_a_width_has_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal of a container has 0 columns until somebody says otherwise."""
    with on_terminal(monkeypatch, columns=0) as drawn, progress_bar("auto") as report:
        report("writing", 5, 5)
    assert "writing: 100%" in drawn[0]


@pytest.mark.parametrize("shown", ShownProgress)
def test_lines_are_written_where_they_are_asked_for(shown: ShownProgress) -> None:
    stream, now = io.StringIO(), [0.0]
    progress = CommandProgress(shown, stream, clock=lambda: now[0])
    for done in range(1, 6):
        now[0] += 0.4 * LINE_S
        progress("writing", done, 5)
    lines = ["progress: writing 3 of 5 (record)"] if shown is ShownProgress.LINES else []
    assert stream.getvalue().splitlines() == lines
