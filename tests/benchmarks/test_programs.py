"""The benchmarks run: what they use of Poseidon exists, and each program comes to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from benchmarks import codecs, ddp_scripts, flood, many_hosts, simulate
from ps_server.keys import JobKeys
from ps_server.transport.zmq_sockets import ZmqServerTransport
from tests.support.free_ports import free_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"


@pytest.mark.timeout(600)  # a first import compiles all of them
def test_what_benchmarks_import_exists() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if path.parent.name != "published_scripts"  # these train when they are imported
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.needs("native")
def test_codecs(capsys: pytest.CaptureFixture[str]) -> None:
    codecs.main(["--codecs=int8,topk:0.1", "--workers=2", "--size=1000", "--rounds=2"])
    found = capsys.readouterr().out
    assert all(f"| `{codec}` |" in found for codec in ("int8", "topk:0.1"))


def test_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["iteration"]) == 0
    assert capsys.readouterr().out


def test_a_job_of_simulated_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    found = many_hosts.measure(3, 2, tmp_path)
    assert set(found) == set(many_hosts.COLUMNS)
    assert all(figure >= 0 for figure in found.values())


@pytest.mark.parametrize("kind", flood.KINDS)
def test_every_kind_of_a_flood_knocks(kind: str) -> None:
    keys = JobKeys.new(workers=1, shards=1)
    shard = ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(0))
    with zmq.Context() as context:
        end = (
            flood.connect(shard.address)
            if kind == "connections"
            else flood.dial(context, shard.address, keys.shards[0].public, kind)
        )
        deadline = time.monotonic() + 20
        while shard.refused == 0 and time.monotonic() < deadline:
            assert shard.receive(0.05) == []
        assert shard.refused > 0
        end()
    shard.close()


@dataclass(frozen=True)
class ThisMachine:
    """A host that is not a namespace."""

    index: int = 0
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


@pytest.mark.thorough
@pytest.mark.processes
def test_a_script_of_ddp_is_measured() -> None:
    here: list[Any] = [ThisMachine()]
    command = [sys.executable, str(ddp_scripts.SCRIPT), "linear", "ddp", "6"]
    seconds, loss = ddp_scripts.measure(here, command, free_port())
    assert seconds > 0
    assert 0 < loss < 3
