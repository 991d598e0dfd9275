"""The dashboard in a real browser: curves of a real job move, a lost worker and the restart
show, the end shows.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import polling
from tests.support.needs import find

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("uvicorn")
from selenium.webdriver.chrome.service import Service  # noqa: E402

pytestmark = [pytest.mark.timeout(170), pytest.mark.needs("browser")]
NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 8 dim: 100 } shape { dim: 8 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "pace" type: "Pace" bottom: "data" top: "paced" }
layer { name: "ip" type: "InnerProduct" bottom: "paced" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
PACE = """
import time
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.registry import register

@register("Pace")
class Pace(Layer):
    def setup(self, bottoms):
        return [bottoms[0]]

    def forward(self, bottom):
        time.sleep(0.005)  # a net that computes for so long; the processors are the browser's
        return bottom * 1.0
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 10000000 display: 10 snapshot: 100\n'
SOLVER += 'test_iter: 2 test_interval: 100 snapshot_prefix: "snap"\n'


@pytest.fixture
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = find("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(find("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job of two clients with its page: the launcher, and the page's address."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "state"))
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "pace.py").write_text(PACE)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    (tmp_path / "hosts").write_text("0 127.0.0.1 0\n1 127.0.0.1 0 role=worker\n")
    argv = [
        sys.executable,
        "-m",
        "poseidon",
        "train",
        "--solver=solver.prototxt",
        "--hostfile=hosts",
        "--output=out",
    ]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            [*argv, "--import=pace", "--dashboard", "--max_restarts=1", "--snapshot_keep=2"],
            cwd=tmp_path,
            stderr=log,
            text=True,
        )
    try:
        until(
            lambda: "dashboard at http" in (tmp_path / "log").read_text(),
            "the page's address",
            90.0,
        )
        (line,) = (
            each for each in (tmp_path / "log").read_text().splitlines() if "dashboard at" in each
        )
        yield launcher, line.split()[-1]
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


def until(found: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Poll the page as `polling.until`, but seldom: each question takes the browser's processor
    time.
    """
    polling.until(found, what, timeout_s, every_s=0.1)


def shown(browser: Any, id_: str) -> str:
    return str(
        browser.execute_script("return document.getElementById(arguments[0]).textContent", id_)
    )


def last_iteration(browser: Any) -> float:
    """Return where the loss curve ends."""
    script = "const job = jobs.get(shown); return job && job.series.loss ? job.series.loss[0].at(-1) : -1"
    return float(browser.execute_script(script))


def test_a_job_is_seen_to_train_to_lose_a_worker_and_to_go_on(
    job: tuple[subprocess.Popen[str], str], browser: Any, tmp_path: Path
) -> None:
    launcher, address = job
    browser.get(address)
    until(lambda: shown(browser, "state") == "running", "the job runs", 90.0)
    until(lambda: last_iteration(browser) > 0, "the curve of the loss begins", 60.0)
    before = last_iteration(browser)
    until(lambda: last_iteration(browser) > before, "the curve moves", 60.0)
    assert (
        browser.execute_script("return document.querySelectorAll('#chart-Loss canvas').length") == 1
    )
    until(lambda: shown(browser, "workers").count("worker") >= 2, "both workers are listed", 60.0)
    until(lambda: "snapshot at iteration" in shown(browser, "events"), "a snapshot shows", 60.0)
    browser.find_element("css selector", "#log-form button").click()
    until(lambda: "worker 0: I" in shown(browser, "log"), "the log shows", 60.0)
    assert browser.execute_script(
        "return [0.0049, 0.00001, 0, 427, 10000000, 0.98765432, null].map((value) => number(value))"
    ) == ["0.0049", "1e-5", "0", "427", "10,000,000", "0.9877", "–"]

    hidden = "return [...document.querySelectorAll('section')].filter((one) => !one.offsetHeight).map((one) => one.id)"
    until(lambda: browser.execute_script(hidden) == ["timeline"], "all but a trace is shown", 60.0)
    empty = (
        "for (const id of ['charts', 'shard-rows']) document.getElementById(id).textContent = '';"
    )
    assert browser.execute_script(empty + hidden) == ["", "", "timeline"], "nor these anything"
    browser.refresh()
    until(lambda: last_iteration(browser) > before, "the curve is drawn again", 60.0)

    _worker(launcher.pid, 1).kill()
    until(lambda: "the job was restarted" in shown(browser, "events"), "the restart shows", 90.0)
    after = last_iteration(browser)
    until(lambda: last_iteration(browser) > after, "the curve goes on", 90.0)

    launcher.send_signal(signal.SIGINT)
    until(lambda: _end(tmp_path) > after, "the end is recorded", 60.0)
    assert launcher.wait(60) == 130
    errors = [
        entry["message"]
        for entry in browser.get_log("browser")
        if "ERR_CONNECTION_REFUSED" not in entry["message"]
    ]
    assert [error for error in errors if "/stream" not in error and "/api/jobs" not in error] == []


def _end(folder: Path) -> int:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    return int(last["iteration"]) if last["kind"] == "end" else -1


def _worker(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a worker."""
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        log = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        if b"poseidon.engine\0" in log:
            found.append(process)
    assert len(found) == 2
    return sorted(found, key=lambda process: process.pid)[rank]
