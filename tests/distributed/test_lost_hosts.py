"""A job on real hosts that all have the whole data: one is cut off for good, and the others
finish the job, with the weights of all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.chaos_runs.definitions import RECORDS, write_job, write_pictures
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.exchange.kinds import ExchangeKind
from tests.support.live_processes import none_left
from tests.support.ssh_hosts import ROOT, SshHost, SshHosts, clean_environment
from tests.support.training import Job, run

CUT_AT = "Iteration 120,"
END = 400

pytestmark = [
    pytest.mark.needs("hosts"),
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.thorough,
]


def _prepare(desk: SshHost, hosts: list[SshHost]) -> None:
    write_job(
        desk.outside("/root/job"),
        END,
        source="/root/data/train_lmdb",
        prefix="/root/snaps/snap",
        shared=True,
    )
    desk.outside("/root/hosts").write_text(
        "".join(f"{k} {host.name} 0\n" for k, host in enumerate(hosts))
    )
    for host in hosts:
        for name in ("snaps", "data"):
            host.outside(f"/root/{name}").mkdir()
        write_pictures(host.outside("/root/data/train_lmdb"), 0, RECORDS)


def _undisturbed(folder: Path) -> list[tuple[str, list[np.ndarray]]]:
    """Return the blobs of a job that never loses a host."""
    torch.set_num_threads(1)
    folder.mkdir()
    solver = write_job(
        folder, END, source=str(folder / "train_lmdb"), prefix=str(folder / "snap"), shared=True
    )
    run(solver, Job(workers=3, shards=3, kind=ExchangeKind.AUTO))
    return read_model(folder / f"snap_iter_{END}.caffemodel")


@pytest.mark.parametrize(("lost", "all_are_lost"), [(0, False), (2, True)])
def test_a_host_that_never_comes_back_is_left_out(
    tmp_path: Path, lost: int, all_are_lost: bool
) -> None:
    """Also the one that writes the snapshots and the log; also where the launcher loses every
    host, and finds the others again.
    """
    with SshHosts(tmp_path, 4) as every:
        hosts, desk = every[:3], every[3]
        _prepare(desk, hosts)
        words = [
            "train",
            "--solver=job/solver.prototxt",
            "--hostfile=hosts",
            "--output=out",
            "--threads=1",
            "--elastic=0",
        ]
        command = desk.command([sys.executable, "-m", "poseidon", *words, "--return_timeout=2"])
        told: list[str] = []
        with subprocess.Popen(
            command,
            env=clean_environment({"PYTHONPATH": str(ROOT)}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            assert launcher.stderr is not None
            for line in launcher.stderr:
                told.append(line)
                if CUT_AT in line and len(hosts) == 3:
                    hosts.pop(lost).cut()
                    if all_are_lost:
                        desk.cut()
                elif all_are_lost and "; trying again" in line:
                    desk.mend()
        said = "".join(told)
        assert launcher.returncode == 0, said
        assert "restart 1 of 3: continuing from " in said
        names = f"client {lost} (host{lost})"
        left = "2 clients, 2 workers, 3 virtual workers, 2 shards from here on"
        assert f"continuing without {names}: {left}" in said
        assert f"finished at iteration {END} after 1 restart" in told[-1]
        writer = hosts[0].outside("/root/snaps")
        ended = read_model(writer / f"snap_iter_{END}.caffemodel")
        for (_, blobs), (_, expected) in zip(ended, _undisturbed(tmp_path / "whole"), strict=True):
            assert all(map(np.array_equal, blobs, expected))
        assert none_left([process.pid for host in every for process in host.processes()], 30.0)
