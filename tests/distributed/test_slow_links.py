"""A job on slow links, a script's and a solver's: each sink shows how long workers wait, and the
page names the links and what to do.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from benchmarks.testbed import links
from poseidon.cli.main import main
from poseidon.launcher.job_folder import read_records
from tests.support.polling import until
from tests.support.ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.thorough,  # half a minute until the page is sure
    pytest.mark.timeout(300),
    pytest.mark.needs("hosts"),
]
pytest.importorskip("uvicorn")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
RATE_MBIT = 50.0
SCRIPT = """
import torch, poseidon
model = torch.nn.Linear(400, 400)
with poseidon.distribute(model, poseidon.SGD(lr=0.001)) as group:
    while not group.stopping:
        loss = model(torch.ones(4, 400)).square().mean()
        loss.backward()
        group.step()
        group.log(loss=loss)
"""
DDP = """
import torch, torch.distributed, poseidon
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(400, 400))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
while True:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 400)).square().mean()
    loss.backward()
    optimizer.step()
    poseidon.log(loss=loss)
"""
NET = """
layer { name: "data" type: "DummyData" top: "data" dummy_data_param { shape { dim: 4 dim: 400 } data_filler { value: 1 } } }
layer { name: "zero" type: "DummyData" top: "zero" dummy_data_param { shape { dim: 4 dim: 400 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 400 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "zero" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 1e-6 lr_policy: "fixed" max_iter: 1000000 display: 1 solver_mode: CPU\n'
FILES = {"script.py": SCRIPT, "ddp.py": DDP, "net.prototxt": NET, "solver.prototxt": SOLVER}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Two hosts with slow links."""
    with SshHosts(tmp_path, 2) as made:
        for host in made:
            links.shape(host.network, RATE_MBIT)
        yield made


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return unescape(answer.read().decode())


def part(page: str, id_: str) -> str:
    (text,) = re.findall(rf'id="{id_}"[^>]*>(.*?)</p>', page)
    return str(text)


@pytest.mark.parametrize(
    "words",
    [["run", "script.py"], ["run", "--ddp", "ddp.py"], ["train", "--solver=solver.prototxt"]],
    ids=["script", "ddp", "solver"],
)
def test_every_sink_shows_that_workers_wait_for_slow_links(
    hosts: SshHosts, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "machines").write_text(
        "".join(f"{number} {host.address} 0\n" for number, host in enumerate(hosts))
    )
    command, *own = words
    flags = ["--hostfile=machines", "--output=out", "--exchange=ps", "--threads=1"]
    flags += ["--dashboard", "--metrics_port=0", "--tensorboard_dir=board"]
    environment = {**hosts.environment(), "POSEIDON_HOME": str(tmp_path / "state")}
    log = tmp_path / "log"
    with log.open("w") as stream:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "poseidon", command, *flags, *own],
            cwd=tmp_path,
            env=environment,
            stderr=stream,
        )
    try:

        def addresses() -> list[str]:
            said = log.read_text()
            return [
                found[1]
                for what in ("dashboard", "metrics")
                if (found := re.search(rf"{what} at (http\S+)", said))
            ]

        until(lambda: len(addresses()) == 2 or launcher.poll() is not None, "a page", 90.0)
        assert launcher.poll() is None, log.read_text()
        dashboard, metrics = addresses()
        until(
            lambda: "The links are the limit" in fetch(dashboard) or launcher.poll() is not None,
            "the page names the links",
            120.0,
            every_s=1.0,
        )
        page, prometheus = fetch(dashboard), fetch(metrics)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(90)
    found = re.fullmatch(
        r"The links are the limit: they carry data (\d+) % of the time, and workers wait (\d+) %\.",
        part(page, "bottleneck"),
    )
    assert found, part(page, "bottleneck")
    assert int(found[2]) > 15
    assert "--compress=int8" in part(page, "advice")
    waited = dict(
        re.findall(r'^poseidon_worker_waited_seconds\{.*rank="(\d)"\} (\S+)$', prometheus, re.M)
    )
    assert set(waited) == {"0", "1"}
    assert all(float(seconds) > 1 for seconds in waited.values())
    assert 'poseidon_train_output{job="' in prometheus
    workers = [record for record in read_records(tmp_path / "out") if record["kind"] == "worker"]
    for rank in (0, 1):
        mine = [record["waited_s"] for record in workers if record["index"] == rank]
        assert mine == sorted(mine) and mine[-1] > 1
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for tag in ("waited_s/worker_0", "waited_s/worker_1"):
        assert events.Scalars(tag)[-1].value > 1
    assert events.Scalars("train/loss")
    assert main(["stats", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    (total,) = re.findall(r"^total .*", table, re.MULTILINE)
    assert float(total.split()[3].replace(",", "")) > 20, "milliseconds an iteration"
    assert re.search(r"^(train )?loss +[\d,]+ ", table, re.MULTILINE)
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert len(statistics["workers"]) == 2
