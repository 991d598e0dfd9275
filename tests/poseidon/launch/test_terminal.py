"""What a user sees of a job."""

from __future__ import annotations

import io

import pytest

from poseidon.cluster.plan import ProcessName, Role
from poseidon.launch.request import ShownLogs
from poseidon.launch.terminal import Terminal
from poseidon.metrics.progress import ShownProgress

FIRST = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
SECOND = ProcessName(role=Role.WORKER, index=1, client=1, host="127.0.0.1")
SHARD = ProcessName(role=Role.SHARD, index=0, client=0, host="127.0.0.1")
HEAD = "1126 20:40:16.731869 29444 solver.cpp:294] "


def test_worker_0_is_shown_whole_and_others_when_it_matters_once() -> None:
    stream = io.StringIO()
    terminal = Terminal("net", stream, on_started=lambda: None)
    terminal.on_log(FIRST, f"I{HEAD}Iteration 1")
    terminal.on_log(SECOND, f"I{HEAD}Iteration 1")
    for _ in range(3):
        terminal.on_log(SECOND, f"W{HEAD}slow disk")
    terminal.on_log(SHARD, "Segmentation fault")
    terminal.on_log(FIRST, f"F{HEAD}no such blob")  # the launcher says it when it ends the job
    terminal.close()
    assert stream.getvalue().splitlines() == [
        f"I{HEAD}Iteration 1",
        f"worker 1: W{HEAD}slow disk",
        "shard 0: Segmentation fault",
    ]


def test_events_that_make_no_sense_are_passed_over() -> None:
    stream = io.StringIO()
    started = []
    terminal = Terminal("net", stream, on_started=lambda: started.append(1))
    terminal.on_started()
    for event in ({"event": "progress"}, {"event": "progress", "iteration": "x"}, {"event": "alive"}):
        terminal.on_event(FIRST, event)
    terminal.close()
    assert stream.getvalue() == ""
    assert started == [1]


def test_everyones_lines_after_their_client_when_asked() -> None:
    stream = io.StringIO()
    terminal = Terminal("net", stream, on_started=lambda: None, shown=ShownLogs.ALL)
    for name in (FIRST, SECOND, SHARD):
        terminal.on_log(name, f"I{HEAD}Iteration 1")
        terminal.on_log(name, f"W{HEAD}slow disk")
    for name in (FIRST, SECOND):
        terminal.on_log(name, "Epoch 1")  # what a script prints
    terminal.close()
    assert stream.getvalue().splitlines() == [
        f"client 0, worker 0: I{HEAD}Iteration 1",
        f"client 0, worker 0: W{HEAD}slow disk",
        f"client 1, worker 1: I{HEAD}Iteration 1",
        f"client 0, shard 0: I{HEAD}Iteration 1",
        "client 0, worker 0: Epoch 1",
        "client 1, worker 1: Epoch 1",
    ]


def test_a_warning_is_shown_once_whoever_gives_it() -> None:
    stream = io.StringIO()
    terminal = Terminal("net", stream, on_started=lambda: None)
    for name in (FIRST, SECOND, FIRST):
        terminal.on_log(name, f"W{HEAD}slow disk")
    for _ in range(2):
        terminal.on_log(FIRST, "    ^^^^^")  # of a traceback
    terminal.close()
    assert stream.getvalue().splitlines() == [f"W{HEAD}slow disk", "    ^^^^^", "    ^^^^^"]


def test_what_was_reached() -> None:
    terminal = Terminal("net", io.StringIO(), on_started=lambda: None)
    assert terminal.scores() == []
    terminal.on_event(FIRST, {"event": "progress", "iteration": 9, "max_iter": 9, "images": 9, "loss": 0.25})
    assert terminal.scores() == ["training loss 0.25"]
    scores = [["accuracy", "0.7"], ["loss", "0.9"]]
    terminal.on_event(FIRST, {"event": "tested", "iteration": 4, "net": 0, "scores": [["accuracy", "0.1"]]})
    terminal.on_event(FIRST, {"event": "tested", "iteration": 9, "net": 0, "scores": scores})
    for wrong in ({"net": "x"}, {"net": 1, "scores": [["a", 1]]}, {"net": 1, "scores": "a"}):
        terminal.on_event(FIRST, {"event": "tested", "iteration": 9, **wrong})
    assert terminal.scores() == ["accuracy = 0.7, loss = 0.9 (test at iteration 9)"]
    terminal.on_event(FIRST, {"event": "tested", "iteration": 9, "net": 1, "scores": [["x", "1"]] * 20})
    first, second = terminal.scores()
    assert first.startswith("test net #0: accuracy")
    assert second.endswith("x = 1 and 12 more (test at iteration 9)")


def test_off_a_terminal_a_line_comes_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    terminal = Terminal("net", stream, on_started=lambda: None, interval_s=60.0, clock=lambda: now[0])
    for second in range(0, 150, 10):
        now[0] = float(second)
        terminal.on_event(FIRST, {"event": "progress", "iteration": second, "max_iter": 3600, "images": 0})
        terminal.on_event(SECOND, {"event": "progress", "iteration": 1, "max_iter": 2, "images": 0})
    assert stream.getvalue().splitlines() == [
        "progress: iteration 60 of 3600, 1/s, 0:59:00 left",
        "progress: iteration 120 of 3600, 1/s, 0:58:00 left",
    ]


class Tty(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


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
    terminal = Terminal("net", output, on_started=lambda: None, progress=progress)
    terminal.on_event(FIRST, PROGRESS)
    terminal.on_log(FIRST, f"I{HEAD}Iteration 1")
    terminal.on_log(FIRST, f"W{HEAD}slow disk")
    terminal.print("the launcher's own")
    terminal.close()
    text = output.getvalue()
    assert ("Iteration 1" in text) is log
    assert ("net: " in text and "it/s" in text) is bar
    assert "slow disk" in text
    assert "the launcher's own" in text
