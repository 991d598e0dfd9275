#!/usr/bin/env python3
"""Measure the cost of a job's page and sinks in its iterations.

    python benchmarks/page_overhead.py
    python benchmarks/page_overhead.py --turns=60 --turn_s=4

One real job of two workers on this machine, with `--dashboard`, `--metrics_port` and
`--tensorboard_dir`, computes without a break. By turns all of that is on or off: on, a client reads
the page's stream and Prometheus' values; off, the launcher passes no event to the records, and the
page's process is stopped. So neighbouring seconds of one job are compared.

How to read it: iterations of worker 0. A ratio divides the mean iteration in a turn with everything
on by the mean of the two turns around it; the median and the quartiles of all turns are printed.
The processor times of the launcher and of the page are printed beside, as parts of one processor:
they do not depend on what else this machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import psutil

from poseidon.cli.main import main as poseidon
from poseidon.cluster.job_plan import ProcessName
from poseidon.launcher import runner
from poseidon.launcher.sinks import JobRecords

LAYER = """
import time

import caffe


class Moments(caffe.Layer):
    def setup(self, bottom, top):
        self.file = open(f"moments_{self.rank}", "w", buffering=1)

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        self.file.write(f"{time.monotonic()}\\n")

    def backward(self, top, propagate_down, bottom):
        pass
"""
NET = """
name: "overhead"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: %d dim: 3 dim: 32 dim: 32 } shape { dim: %d } } }
layer { name: "moments" type: "Python" bottom: "data" top: "same" python_param { module: "moments" layer: "Moments" } }
layer { name: "conv" type: "Convolution" bottom: "same" top: "conv"
  convolution_param { num_output: 32 kernel_size: 5 pad: 2 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.0001 lr_policy: "fixed" momentum: 0.9 random_seed: 7 display: 20 max_iter: 100000000
snapshot_after_train: false snapshot_prefix: "snap"
"""
EDGE_S = 0.3
"""Iterations so close to a change of turns do not count."""
SCRAPE_S = 5.0
START_LIMIT_S = 90.0
_LAUNCHER = "--launch"


def is_on(moment_s: float, turn_s: float) -> bool:
    """Return whether everything is on at a moment of the monotonic clock, which all processes
    share.
    """
    return int(moment_s / turn_s) % 2 == 1


def launch(turn_s: float, arguments: list[str]) -> int:
    """Run `poseidon` with records that are off in every other turn."""

    class RecordsByTurns(JobRecords):
        def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
            if is_on(time.monotonic(), turn_s):
                super().on_event(name, event)

    runner.JobRecords = RecordsByTurns  # type: ignore[misc]
    return poseidon(arguments)


class Turns:
    """The turns of a running job: stops and continues its page, and reads from it and from
    Prometheus.

    Args:
        page: address.
        metrics: address of Prometheus' values.
        server: the page's process.
        launcher: of the job.
        turn_s: length.
    """

    def __init__(
        self,
        page: str,
        metrics: str,
        server: psutil.Process,
        launcher: psutil.Process,
        turn_s: float,
    ) -> None:
        self._page, self._metrics, self._turn_s = page, metrics, turn_s
        self._processes = {"launcher": launcher, "page": server}
        self._over = threading.Event()
        self.used_s: dict[tuple[str, bool], list[float]] = {}
        """Processor time of each process in each turn, by its name and whether everything was
        on.
        """

    def run(self, count: int) -> None:
        """Run so many pairs of turns; begins and ends with one that is off."""
        reader = threading.Thread(target=self._read, name="page-reader", daemon=True)
        self._await_turn(on=False)
        reader.start()
        for _ in range(count):
            for on in (False, True):
                self._turn(on)
        self._turn(on=False)
        self._over.set()
        self._processes["page"].resume()

    def _await_turn(self, *, on: bool) -> None:
        while is_on(time.monotonic(), self._turn_s) is not on:
            time.sleep(0.005)

    def _turn(self, on: bool) -> None:
        self._await_turn(on=on)
        (self._processes["page"].resume if on else self._processes["page"].suspend)()
        before = self._times()
        time.sleep(max(0.0, self._turn_s - time.monotonic() % self._turn_s - 0.02))
        for name, used_s in self._times().items():
            self.used_s.setdefault((name, on), []).append((used_s - before[name]) / self._turn_s)

    def _times(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def _read(self) -> None:
        """Read the page's stream all the time, and Prometheus' values every few seconds."""
        with urllib.request.urlopen(f"{self._page}api/jobs") as answer:
            (found,) = json.load(answer)
        scraped_s = 0.0
        with urllib.request.urlopen(f"{self._page}api/jobs/{found['name']}/stream") as stream:
            while not self._over.is_set() and stream.readline():
                if time.monotonic() - scraped_s > SCRAPE_S:
                    scraped_s = time.monotonic()
                    with urllib.request.urlopen(self._metrics) as values:
                        values.read()


def ratios(moments: list[float], turn_s: float) -> list[float]:
    """Return for each turn that is on its mean iteration, as a multiple of the mean iteration of
    the turns around it.

    Args:
        moments: at which iterations began, in seconds of the monotonic clock.
        turn_s: length of a turn.
    """
    turns: dict[int, list[float]] = {}
    for begin_s, end_s in itertools.pairwise(moments):
        turn = int(begin_s / turn_s)
        if begin_s - turn * turn_s > EDGE_S and (turn + 1) * turn_s - end_s > EDGE_S:
            turns.setdefault(turn, []).append(end_s - begin_s)
    means = {turn: statistics.fmean(lengths) for turn, lengths in turns.items()}
    around = {turn: (means.get(turn - 1), means.get(turn + 1)) for turn in means if turn % 2 == 1}
    return [
        2 * means[turn] / (before + after)
        for turn, (before, after) in around.items()
        if before is not None and after is not None
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the ratio."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == [_LAUNCHER]:
        return launch(float(words[1]), words[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=30, help="of each kind (30)")
    parser.add_argument("--turn_s", type=float, default=4.0, help="seconds of a turn (4)")
    parser.add_argument(
        "--batch", type=int, default=16, help="images a worker, for the length of an iteration (16)"
    )
    flags = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="poseidon-page-") as name:
        folder = Path(name)
        for file, text in {
            "moments.py": LAYER,
            "net.prototxt": NET % (flags.batch, flags.batch),
            "solver.prototxt": SOLVER,
            "hosts": "0 127.0.0.1 0\n1 127.0.0.1 0\n",
        }.items():
            (folder / file).write_text(text, encoding="ascii")
        with job(folder, flags.turn_s) as launcher:
            turns = _start_turns(folder, launcher, flags.turn_s)
            warm_s = time.monotonic()
            turns.run(flags.turns)
        lines = (folder / "moments_0").read_text(encoding="ascii").splitlines()
    moments = [float(line) for line in lines if float(line) > warm_s]
    _print(moments, ratios(moments, flags.turn_s), turns)
    return 0


@contextlib.contextmanager
def job(folder: Path, turn_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run the job; what it prints goes to `log`."""
    argv = [sys.executable, str(Path(__file__).resolve()), _LAUNCHER, str(turn_s), "train"]
    argv += ["--solver=solver.prototxt", "--hostfile=hosts", "--output=out", "--threads=1"]
    argv += ["--dashboard", "--metrics_port=0", "--tensorboard_dir=board"]
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield launcher
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)


def _start_turns(folder: Path, launcher: subprocess.Popen[bytes], turn_s: float) -> Turns:
    """Wait until the job trains, and return its turns."""
    moments, end_s = folder / "moments_0", time.monotonic() + START_LIMIT_S
    while not (moments.exists() and moments.stat().st_size > 1000):
        if launcher.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(
                f"the job does not train:\n{(folder / 'log').read_text(encoding='utf-8')}"
            )
        time.sleep(0.2)
    log = (folder / "log").read_text(encoding="utf-8")
    page, metrics = (re.search(rf"{name} at (http\S+)", log) for name in ("dashboard", "metrics"))
    assert page is not None and metrics is not None, log
    process = psutil.Process(launcher.pid)
    (server,) = (child for child in process.children() if "dashboard" in child.cmdline())
    return Turns(page[1], metrics[1], server, process, turn_s)


def _print(moments: list[float], found: list[float], turns: Turns) -> None:
    length_s = statistics.median(end - begin for begin, end in itertools.pairwise(moments))
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"an iteration: {length_s * 1e3:.1f} ms; {len(found)} turns with everything on")
    print(f"on / off: median {middle - 1:+.2%}, quartiles {low - 1:+.2%} to {high - 1:+.2%}")
    for name in ("launcher", "page"):
        on, off = (statistics.fmean(turns.used_s[name, state]) for state in (True, False))
        print(f"processor time of the {name}: {on:.2%} of one processor on, {off:.2%} off")


if __name__ == "__main__":
    raise SystemExit(main())
