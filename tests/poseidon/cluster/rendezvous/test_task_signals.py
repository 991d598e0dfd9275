"""Whether rank 0 itself was asked to end, or only another task: in a process of its own, for it
gets true signals.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import os, signal, sys, threading
from poseidon.cluster.rendezvous import task_signals

taken = []
came = threading.Event()
def take(*_):
    taken.append(1)
    came.set()
signal.signal(signal.SIGTERM, take)
task_signals.WAIT_S = float(sys.argv[2])
with task_signals.TaskSignals() as signals:
    if sys.argv[1] == "both":
        os.kill(os.getpid(), signal.SIGTERM)
    signals.other_task_signalled(lambda: False)
    signals.other_task_signalled(lambda: False)
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


LEAVES = """
import queue, signal
from poseidon.cluster.rendezvous import task_signals

taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(1))
left = queue.SimpleQueue()
task_signals.WAIT_S = 0.0
with task_signals.TaskSignals() as signals:
    for task in "ab":
        signals.other_task_signalled(lambda task=task: left.put(task) is None)
    print(left.get(timeout=30), left.get(timeout=30), len(taken))
"""


@pytest.mark.processes
def test_hosts_of_other_tasks_leave_where_they_can() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "a b 0\n"


ENDED = """
import os, signal, time
from poseidon.cluster.rendezvous import task_signals

taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(1))
task_signals.WAIT_S = 0.3
with task_signals.TaskSignals() as signals:
    signals.other_task_signalled(lambda: False)
time.sleep(1.0)
print(len(taken))
"""


@pytest.mark.processes
def test_a_job_that_has_ended_is_not_signalled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0\n"


BROKEN = """
import logging, os, signal, threading
from poseidon.cluster.rendezvous import task_signals

logging.basicConfig(format="%(message)s")
came = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: came.set())
def fail(*_):
    raise ValueError("negative argument")
os.read = fail
task_signals.WAIT_S = 30.0
with task_signals.TaskSignals() as signals:
    signals.other_task_signalled(lambda: False)
    came.wait(30)
print(came.is_set())
"""


@pytest.mark.processes
def test_a_failure_is_logged_and_the_request_still_reaches_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "True\n"
    assert (
        done.stderr
        == "cannot tell whether only this task was signalled, so it ends: ValueError('negative "
        "argument')\n"
    )
