"""Whether rank 0 itself was asked to end, or only another task: in a process of its own, for it gets true signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.cli.own_signals import ctrl_c_ends_at_once

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, signal, sys, threading
from poseidon.cli.own_signals import OwnSignals

taken = []
came = threading.Event()
def take(*_):
    taken.append(1)
    came.set()
signal.signal(signal.SIGTERM, take)
with OwnSignals(wait_s=float(sys.argv[2])) as signals:
    if sys.argv[1] == "both":
        os.kill(os.getpid(), signal.SIGTERM)
    signals.asked_elsewhere("SIGTERM")
    signals.asked_elsewhere("SIGTERM")
    [thread.join(30) for thread in threading.enumerate() if thread.name == "poseidon asked to end"]
    came.wait(30)
print(len(taken))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("who", "wait_s"), [("another", "0"), ("both", "30")])
def test_one_request_reaches_the_launcher(who: str, wait_s: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, who, wait_s],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1\n"


PROGRAM = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from poseidon.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_a_command_is_imported_is_one_line() -> None:
    """Though it comes within an import of numpy, which would lose a KeyboardInterrupt."""
    words = [sys.executable, "-c", PROGRAM, "train", "--solver=none"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "poseidon train: interrupted\n")


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ctrl_c_ends_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ctrl_c_ends_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
