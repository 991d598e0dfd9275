"""The progress line: on a terminal only, never in the way of the log."""

from __future__ import annotations

import io
import os
import sys

import pytest

from poseidon.observe.metrics.progress import JobProgress, ProgressLine, ProgressMeter


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and may go away."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_only_the_log_is_written() -> None:
    stream = io.StringIO()
    line = ProgressLine("CIFAR10_quick", stream)
    line.update(JobProgress(iteration=1, max_iter=10, images=100))
    line.write("I1126 text")
    line.close()
    assert stream.getvalue() == "I1126 text\n"


def test_on_a_terminal() -> None:
    stream = Terminal()
    line = ProgressLine("CIFAR10_quick", stream)
    line.update(JobProgress(iteration=2000, max_iter=4000))
    line.update(JobProgress(iteration=2000, max_iter=4000, tested=3, to_test=50))
    line.update(JobProgress(iteration=2400, max_iter=4000, images_rate=2000.0, loss=1.0345678))
    line.write("a line of log")
    line.close()
    line.close()
    shown = stream.getvalue()
    assert "CIFAR10_quick:  50%" in shown
    assert "2400/4000" in shown
    assert "testing 3/50" in shown
    assert "2000 images/s, loss 1.035" in shown
    # The log line stands alone: before it the progress line was wiped, and it is drawn anew after
    # it.
    before, _, after = shown.partition("a line of log\n")
    assert before.endswith("\r")
    assert before.rstrip("\r").endswith(" ")
    assert after.lstrip("\r").startswith("CIFAR10_quick:  60%")
    assert shown.endswith("\n")


def test_lines_before_the_first_update() -> None:
    stream = Terminal()
    line = ProgressLine("net", stream)
    line.write("first")
    line.close()
    assert stream.getvalue() == "first\n"


def test_a_terminal_that_goes_away_ends_the_line_only() -> None:
    stream = Terminal()
    line = ProgressLine("net", stream)
    line.update(JobProgress(iteration=1, max_iter=10))
    stream.gone = True
    for iteration in range(2, 5):
        line.update(JobProgress(iteration=iteration, max_iter=10))
        line.write("text")
    line.close()


def test_a_job_whose_end_is_not_known_has_a_line_too() -> None:
    stream = Terminal()
    line = ProgressLine("script.py", stream)
    line.update(JobProgress(iteration=7))
    line.close()
    assert "script.py: 7it [" in stream.getvalue()


def said(iteration: int, **more: object) -> dict[str, object]:
    return {
        "event": "progress",
        "iteration": iteration,
        "max_iter": 100,
        "images": 10 * iteration,
        **more,
    }


def test_rates_leave_out_tests_and_begin_anew_after_a_restart() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    assert meter.update(said(0)) == JobProgress(max_iter=100)
    clock.now = 2.0
    found = meter.update(said(20, loss=1.5))
    assert found == JobProgress(
        iteration=20, max_iter=100, images=200, loss=1.5, rate=10.0, images_rate=100.0
    )
    assert found.summary() == "iteration 20 of 100, 10/s, 100 images/s, loss 1.5, 0:00:08 left"
    found = meter.update(said(20, tested=3, to_test=50))
    assert found is not None
    assert found.position() == "20 of 100, testing 3 of 50"
    for clock.now, iteration, rate in (
        (60.0, 20, 10.0),
        (62.0, 30, 5.0),
        (63.0, 10, 5.0),
        (64.0, 12, 2.0),
    ):
        found = meter.update(said(iteration))
        assert found is not None
        assert (found.iteration, found.rate, found.to_test) == (iteration, rate, 0)


def test_a_script_has_no_end_and_no_images() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    meter.update({"event": "progress", "iteration": 0})
    clock.now = 10.0
    found = meter.update({"event": "progress", "iteration": 5})
    assert found is not None
    assert found.summary() == "iteration 5, 0.5/s"
    assert (found.eta_text(), JobProgress().rate_text()) == ("-", "-")


@pytest.mark.parametrize("event", [{}, {"iteration": "x"}, {"iteration": 1, "max_iter": 0.5}])
def test_what_makes_no_sense_is_passed_over(event: dict[str, object]) -> None:
    assert ProgressMeter().update(event) is None


@pytest.mark.parametrize("on_stderr", [False, True])
def test_a_terminal_without_a_width_has_a_line_too(
    monkeypatch: pytest.MonkeyPatch, on_stderr: bool
) -> None:
    """As in a container whose terminal was never given a size."""
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream:
        if on_stderr:
            monkeypatch.setattr(sys, "stderr", stream)
        line = ProgressLine("net", stream)
        line.update(JobProgress(iteration=1, max_iter=10))
        line.close()
        shown = os.read(leader, 4096).decode()
    os.close(leader)
    assert "net:  10%" in shown
