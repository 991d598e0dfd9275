"""Forked processes: what they say, how they end, and that none outlives the template."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.processes import Processes, environment
from benchmarks.testbed.template import Template
from tests.support.live_processes import none_left

SHARD = "ps_server.__main__"


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_modules_run_in_forks_which_end_with_the_template(tmp_path: Path) -> None:
    with Template(environment()) as template:
        with Processes(tmp_path, template) as processes:
            processes.start_module("mistaken", SHARD, ["--workers", "none"])
            with pytest.raises(TestbedError, match=r"(?s)mistaken failed with status 2.*--workers"):
                while True:
                    processes.check()
        with Processes(tmp_path, template) as processes:
            processes.start_module(
                "shard", SHARD, ["--listen", "tcp://127.0.0.1:0", "--workers", "1"]
            )
            while not processes.output("shard"):
                processes.check()
            assert json.loads(processes.output("shard")[0])["event"] == "listening"
        log = tmp_path / "last.log"
        last = template.fork(
            SHARD,
            ["--listen", "tcp://127.0.0.1:0", "--workers", "1"],
            log=log,
            namespace=None,
            variables={},
        )
        with pytest.raises(subprocess.TimeoutExpired):
            last.wait(0.0)
    assert none_left([last.pid])
    with pytest.raises(TestbedError, match="the template of the workers is gone"):
        last.poll()
