"""The progress line: on a terminal only, never in the way of the log."""

from __future__ import annotations

import io

from poseidon.metrics.progress import ProgressLine


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
    line.update(iteration=1, max_iter=10, images=100)
    line.write("I1126 text")
    line.close()
    assert stream.getvalue() == "I1126 text\n"


def test_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine("CIFAR10_quick", stream, clock=clock)
    line.update(iteration=2000, max_iter=4000, images=1000)
    clock.now = 4.0
    line.update(iteration=2400, max_iter=4000, images=9000, loss=1.0345678)
    line.write("a line of log")
    line.close()
    line.close()
    shown = stream.getvalue()
    assert "CIFAR10_quick:  50%" in shown
    assert "2400/4000" in shown
    assert "2000 images/s, loss 1.035" in shown
    # The log line stands alone: before it the progress line was wiped, and it is drawn anew after it.
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
    line.update(iteration=1, max_iter=10, images=1)
    stream.gone = True
    for iteration in range(2, 5):
        line.update(iteration=iteration, max_iter=10, images=1)
        line.write("text")
    line.close()
