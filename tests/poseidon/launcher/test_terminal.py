"""What a user sees of a job."""

from __future__ import annotations

import io
import re
import sys

import pytest

from poseidon.base.text_files import LineAssembler
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream
from poseidon.flags.flag import ShownProgress
from poseidon.launcher.request import ShownLogs
from poseidon.launcher.terminal import Terminal, on_one_terminal

FIRST = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
SECOND = ProcessName(role=Role.WORKER, index=1, client=1, host="127.0.0.1")
SHARD = ProcessName(role=Role.SHARD, index=0, client=0, host="127.0.0.1")
HEAD = "1126 20:40:16.731869 29444 solver.cpp:294] "


class Tty(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


class Stdout(io.TextIOWrapper):
    """Standard output to a file."""

    buffer: io.BytesIO


def stdout() -> Stdout:
    return Stdout(io.BytesIO(), encoding="ascii")


class Job:
    """Calls a terminal as `run_job` does: with the pieces that processes write, and with their
    lines.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._lines: dict[tuple[ProcessName, OutputStream], LineAssembler] = {}

    def write(
        self, name: ProcessName, text: str, stream: OutputStream = OutputStream.STDERR
    ) -> None:
        self.terminal.on_output(name, stream, text)
        for line in self._lines.setdefault((name, stream), LineAssembler()).feed(text):
            self.terminal.on_log(name, stream, line)

    def print(self, name: ProcessName, text: str) -> None:
        self.write(name, text, OutputStream.STDOUT)


def test_worker_0_is_shown_whole_and_others_when_it_matters_once() -> None:
    stream = io.StringIO()
    job = Job(Terminal("net", stream, on_started=lambda: None))
    job.write(FIRST, f"I{HEAD}Iteration 1\n")
    job.write(SECOND, f"I{HEAD}Iteration 1\n")
    for _ in range(3):
        job.write(SECOND, f"W{HEAD}slow disk\n")
    job.write(FIRST, f"W{HEAD}slow disk\n")
    job.write(SHARD, "Segmentation fault\n")
    for _ in range(2):
        job.write(FIRST, "    ^^^^^\n")  # of a traceback
    job.write(FIRST, f"F{HEAD}no such blob\n")  # the launcher says it when it ends the job
    job.terminal.close()
    assert stream.getvalue().splitlines() == [
        f"I{HEAD}Iteration 1",
        f"worker 1: W{HEAD}slow disk",
        "shard 0: Segmentation fault",
        "    ^^^^^",
        "    ^^^^^",
    ]


def test_events_that_make_no_sense_are_passed_over() -> None:
    stream = io.StringIO()
    started = []
    terminal = Terminal("net", stream, on_started=lambda: started.append(1))
    terminal.on_started()
    for event in (
        {"event": "progress"},
        {"event": "progress", "iteration": "x"},
        {"event": "alive"},
    ):
        terminal.on_event(FIRST, event)
    terminal.close()
    assert stream.getvalue() == ""
    assert started == [1]


def test_everyones_lines_after_their_client_when_asked() -> None:
    stream, out = io.StringIO(), stdout()
    job = Job(Terminal("net", stream, on_started=lambda: None, stdout=out, shown=ShownLogs.ALL))
    for name in (FIRST, SECOND, SHARD):
        job.write(name, f"I{HEAD}Iteration 1\n")
        job.write(name, f"W{HEAD}slow disk\n")
    for name in (FIRST, SECOND):
        job.print(name, "Epoch 1\n")  # of a script
        job.write(name, "\r 50%\r100%\n")
    job.terminal.close()
    assert stream.getvalue().splitlines() == [
        f"client 0, worker 0: I{HEAD}Iteration 1",
        f"client 0, worker 0: W{HEAD}slow disk",
        f"client 1, worker 1: I{HEAD}Iteration 1",
        f"client 0, shard 0: I{HEAD}Iteration 1",
        "client 0, worker 0: 100%",
        "client 1, worker 1: Epoch 1",
        "client 1, worker 1: 100%",
    ]
    assert out.buffer.getvalue() == b"Epoch 1\n"


def test_what_was_reached() -> None:
    terminal = Terminal("net", io.StringIO(), on_started=lambda: None)
    assert terminal.scores() == []
    terminal.on_event(
        FIRST, {"event": "progress", "iteration": 9, "max_iter": 9, "images": 9, "loss": 0.25}
    )
    assert terminal.scores() == ["training loss 0.25"]
    scores = [["accuracy", "0.7"], ["loss", "0.9"]]
    terminal.on_event(
        FIRST, {"event": "tested", "iteration": 4, "net": 0, "scores": [["accuracy", "0.1"]]}
    )
    assert terminal.scores() == [
        "training loss 0.25 (at iteration 9)",
        "accuracy = 0.1 (test at iteration 4)",
    ]
    terminal.on_event(FIRST, {"event": "tested", "iteration": 9, "net": 0, "scores": scores})
    for wrong in ({"net": "x"}, {"net": 1, "scores": [["a", 1]]}, {"net": 1, "scores": "a"}):
        terminal.on_event(FIRST, {"event": "tested", "iteration": 9, **wrong})
    assert terminal.scores() == ["accuracy = 0.7, loss = 0.9 (test at iteration 9)"]
    terminal.on_event(
        FIRST, {"event": "tested", "iteration": 9, "net": 1, "scores": [["x", "1"]] * 20}
    )
    first, second = terminal.scores()
    assert first.startswith("test net #0: accuracy")
    assert second.endswith("x = 1 and 12 more (test at iteration 9)")


def test_off_a_terminal_a_line_comes_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    terminal = Terminal(
        "net", stream, on_started=lambda: None, interval_s=60.0, clock=lambda: now[0]
    )
    for second in range(0, 150, 10):
        now[0] = float(second)
        terminal.on_event(
            FIRST, {"event": "progress", "iteration": second, "max_iter": 3600, "images": 0}
        )
        terminal.on_event(SECOND, {"event": "progress", "iteration": 1, "max_iter": 2, "images": 0})
    assert stream.getvalue().splitlines() == [
        "progress: iteration 60 of 3600, 1/s, 0:59:00 left",
        "progress: iteration 120 of 3600, 1/s, 0:58:00 left",
    ]


PROGRESS = {"event": "progress", "iteration": 5, "max_iter": 9, "images": 5, "loss": 0.25}


@pytest.mark.parametrize(
    ("stream", "progress", "log", "bar"),
    [
        (Tty, ShownProgress.AUTO, True, True),
        (Tty, ShownProgress.BAR, False, True),
        (Tty, ShownProgress.LINES, True, False),
        (io.StringIO, ShownProgress.BAR, True, False),
    ],
)
def test_how_the_progress_is_shown(
    stream: type[io.StringIO], progress: ShownProgress, log: bool, bar: bool
) -> None:
    output = stream()
    job = Job(Terminal("net", output, on_started=lambda: None, progress=progress))
    job.terminal.on_event(FIRST, PROGRESS)
    job.write(FIRST, f"I{HEAD}Iteration 1\n")
    job.write(FIRST, f"W{HEAD}slow disk\n")
    job.terminal.print("the launcher's own")
    job.terminal.close()
    text = output.getvalue()
    assert ("Iteration 1" in text) is log
    assert ("net: " in text and "it/s" in text) is bar
    assert "slow disk" in text
    assert "the launcher's own" in text


TQDM = ["\r  0%|", "\r 50%|", "\r100%|", "\n"]


def test_standard_output_is_that_of_rank_0_byte_for_byte() -> None:
    stream, out = io.StringIO(), stdout()
    job = Job(Terminal("net", stream, on_started=lambda: None, stdout=out))
    for piece in ("loss ", "0.5\n", "\r10%", "\r\n", "\u00e9\udcff", "no end"):
        job.print(FIRST, piece)
        job.terminal.print("of the launcher")
    job.terminal.close()
    assert out.buffer.getvalue() == b"loss 0.5\n\r10%\r\n\xc3\xa9\xffno end"
    assert stream.getvalue() == "of the launcher\n" * 6


def test_a_standard_output_of_text_alone_gets_text() -> None:
    """As in a notebook."""
    out = io.StringIO()
    job = Job(Terminal("net", io.StringIO(), on_started=lambda: None, stdout=out))
    job.print(FIRST, "\u00e9\udcff\n")
    assert out.getvalue() == "\u00e9\ufffd\n"


def test_a_bar_of_a_script_in_a_pipe_is_one_line_and_one_of_another_worker_none() -> None:
    stream = io.StringIO()
    job = Job(Terminal("net", stream, on_started=lambda: None, stdout=stdout()))
    for piece in TQDM:
        job.write(FIRST, piece)
        job.write(SECOND, piece)
    job.write(SECOND, "a library's message\n" * 2)
    job.terminal.close()
    assert stream.getvalue() == "100%|\nworker 1: a library's message\n"


@pytest.mark.parametrize("progress", [ShownProgress.AUTO, ShownProgress.LINES])
def test_a_bar_of_a_script_moves_on_a_terminal_and_is_the_only_one(progress: ShownProgress) -> None:
    tty = Tty()
    job = Job(Terminal("net", tty, on_started=lambda: None, stdout=stdout(), progress=progress))
    for count, piece in enumerate(TQDM, 1):
        job.write(FIRST, piece)
        assert tty.getvalue() == "".join(TQDM[:count])
        job.write(SECOND, piece)
        job.terminal.on_event(FIRST, PROGRESS)
    job.terminal.close()
    assert tty.getvalue() == "".join(TQDM)


def test_a_bar_of_poseidon_gives_way_to_one_of_the_script() -> None:
    tty = Tty()
    job = Job(Terminal("net", tty, on_started=lambda: None, stdout=stdout()))
    job.terminal.on_event(FIRST, PROGRESS)
    assert "it/s" in tty.getvalue()
    job.write(FIRST, TQDM[0])
    before = len(tty.getvalue())
    job.terminal.on_event(FIRST, PROGRESS)
    job.terminal.print("of the launcher")
    job.write(FIRST, TQDM[1])
    job.terminal.close()
    assert tty.getvalue()[before:] == "\nof the launcher\n\r 50%|"


def test_the_bar_waits_while_a_line_is_not_complete() -> None:
    tty = Tty()
    job = Job(Terminal("net", tty, on_started=lambda: None, stdout=stdout()))
    job.terminal.on_event(FIRST, PROGRESS)
    job.write(FIRST, "epoch 1 ...")
    before = len(tty.getvalue())
    job.terminal.on_event(FIRST, PROGRESS)
    assert len(tty.getvalue()) == before
    job.write(FIRST, " done\n")
    assert re.fullmatch(r" done\n\r.*it/s.*", tty.getvalue()[before:], re.DOTALL)
    job.terminal.close()


@pytest.mark.parametrize(
    ("kinds", "one"), [((Tty, Tty), True), ((Tty, io.StringIO), False), ((io.StringIO, Tty), False)]
)
def test_both_streams_may_be_one_terminal(
    kinds: tuple[type[io.StringIO], type[io.StringIO]], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in zip(("stdout", "stderr"), kinds, strict=True):
        monkeypatch.setattr(sys, name, kind())
    assert on_one_terminal() is one


def test_lines_of_the_log_are_still_filtered_where_the_rest_comes_as_it_is() -> None:
    tty = Tty()
    job = Job(Terminal("net", tty, on_started=lambda: None, stdout=stdout()))
    warning = f"W{HEAD}slow disk\n"
    for piece in ("Epoch 1", " of 2\nE", "nd\n", warning[:3], warning[3:] + "x" + warning):
        job.write(FIRST, piece)
    job.write(FIRST, f"\nF{HEAD}no such blob\n{warning}I1126 is a code\nI1126 no end")
    job.terminal.close()
    assert (
        tty.getvalue() == f"Epoch 1 of 2\nEnd\n{warning}x{warning}\nI1126 is a code\nI1126 no end"
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OSError(28, "No space left on device"),
            "warning: standard output cannot be written: No space left on device; what the script "
            "prints is in its log\n",
        ),
        (BrokenPipeError(), ""),
    ],
)
def test_a_standard_output_that_fails_ends_no_job(error: OSError, says: str) -> None:
    class Failing(io.BytesIO):
        def write(self, _: object) -> int:
            raise error

    stream = io.StringIO()
    job = Job(
        Terminal("net", stream, on_started=lambda: None, stdout=Stdout(Failing(), encoding="ascii"))
    )
    job.print(FIRST, "a\n")
    job.print(FIRST, "b\n")
    job.terminal.close()
    assert stream.getvalue() == says
