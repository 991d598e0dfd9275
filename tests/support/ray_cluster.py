"""A Ray cluster of several nodes on this machine, with ports and folders of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from poseidon.base.settings import inherited_environment

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 30.0


class RayCluster:
    """The nodes; the first is the head, on which launchers run.

    Attributes:
        address: of the head, `host:port`.
    """

    def __init__(self) -> None:
        # paths of sockets are short
        self.folder = Path(tempfile.mkdtemp(prefix="pray-", dir="/tmp"))
        environment = {
            **inherited_environment(),
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "5",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_enable_worker_prestart": "0",
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_metrics_collection": "0",
        }
        self._errors = (self.folder / "errors").open("w", encoding="utf-8")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster_child"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._answer()
        self.address = ""

    def add(self, **options: object) -> None:
        """Start a node, `num_cpus=1, resources={"shards": 1}`."""
        self.address = self._ask(f"add {json.dumps(options)}")

    def autoscale(self, **limits: object) -> None:
        """Start Ray's autoscaler on the head, `max_workers=3`; each of its nodes has one CPU."""
        self._ask(f"autoscale {json.dumps(limits)}")

    def kill(self, number: int) -> None:
        """Kill a node and all that Ray runs there.

        Args:
            number: of the node; 0 is the head.
        """
        self._ask(f"kill {number}")

    def autoscaled(self) -> list[psutil.Process]:
        """Return Ray's daemons on the nodes that the autoscaler has started, the newest last."""
        found = []
        for process in psutil.Process(self._child.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.name() == "raylet" and process.ppid() != self._child.pid:
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def held(self) -> int:
        """Return the number of actors and placement groups."""
        return int(self._ask("held"))

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a launcher."""
        return {**inherited_environment(), "PYTHONPATH": str(ROOT), **(more or {})}

    def processes_of(self, job: str) -> list[psutil.Process]:
        """Return the processes with the id of a job among their arguments."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found += [process] if job in process.cmdline() else []
        return found

    def close(self) -> None:
        """End all nodes."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_S)
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                ours = os.getsid(process.pid) == self._child.pid  # Ray renames some processes
                if ours or str(self.folder) in " ".join(process.cmdline()):
                    process.kill()
        self._child.kill()
        self._child.wait()
        self._errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, command: str) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        assert line, (self.folder / "errors").read_text()
        return line
