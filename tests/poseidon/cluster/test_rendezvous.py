"""Which hosts tasks make up, and who cannot take part."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.rendezvous import (
    first_host,
    hosts_of,
    read_key,
    rejection_reason,
    server_keys,
    task_from,
    task_keys,
    write_new_key,
)
from poseidon.errors import JobError, UsageError
from ps_server.json_fields import fields_of, plain


def arrivals(*places: tuple[str, int]) -> list[Join]:
    """Tasks by rank: host and local rank of each."""
    return [
        Join(
            version="1",
            rank=rank,
            size=len(places),
            local_rank=local,
            address=f"at {host}",
            host=host,
        )
        for rank, (host, local) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [(0, 2), (1, 2)]),
        ([("a", 0), ("a", 1), ("b", 0)], [(0, 2), (2, 1)]),
        ([("a", 0), ("b", 0), ("a", 1), ("a", 2)], [(0, 3), (1, 1)]),
        # containers of one machine
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [(0, 2), (2, 2)]),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 0)], [(0, 1), (1, 2), (3, 1)]),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 1)], [(0, 2), (1, 2)]),
    ],
)
def test_hosts_are_numbered_by_the_ranks_of_their_first_tasks(
    places: list[tuple[str, int]], hosts: list[tuple[int, int]]
) -> None:
    found = hosts_of(arrivals(*places)[::-1])
    assert [(host.first.rank, host.tasks) for host in found] == hosts


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([("a", 1), ("a", 0)], "rank 0 has a local rank other than 0"),
        ([("a", 0), ("b", 1)], "rank 1 on b has local rank 1"),
        ([("a", 0), ("a", 2)], "rank 1 on a has local rank 2, and no task there has local rank 1"),
    ],
)
def test_tasks_that_make_no_job(places: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        hosts_of(arrivals(*places))


def test_who_cannot_take_part() -> None:
    first, second = arrivals(("a", 0), ("b", 0))
    assert rejection_reason(second, [first], size=2, version="1") is None
    for size, version, others, message in (
        (2, "2", [first], "rank 1 on b has Poseidon 1, rank 0 has 2"),
        (3, "1", [first], "rank 1 on b expects 2 tasks, rank 0 3"),
        (2, "1", [first, second], "rank 1 on b has joined already, on b"),
    ):
        assert message in str(rejection_reason(second, others, size=size, version=version))
    for rank in (-1, 2):
        stranger = replace(second, rank=rank)
        why = rejection_reason(stranger, [first], size=2, version="1")
        assert why == f"rank {rank} on b is not one of 2 tasks"


def test_a_new_key_serves_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_key(path)
    host, task = server_keys(key), task_keys(key)
    assert host.admit == (task.own.public,) and task.expect == (host.own.public,)
    assert host.own.public != task.own.public
    told = json.dumps([fields_of(host), fields_of(task)], default=plain)
    assert key.decode() not in f"{host}{task}{told}"
    with pytest.raises(UsageError, match=r"key exists already: use it as it is \(--key_file="):
        write_new_key(path)


def test_another_key_makes_other_pairs() -> None:
    assert server_keys(b"a" * 32).own.public != server_keys(b"b" * 32).own.public


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("k" * 64, 0o644, "others can read"),
        ("k" * 64, 0o640, "others can read"),
        ("short\n", 0o600, "holds 5 bytes; expected 32 to 4096 random bytes"),
        ("k" * 5000, 0o600, "expected 32 to 4096"),
    ],
)
def test_files_that_are_no_key(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        read_key(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; make"):
        read_key(tmp_path / "none")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(UsageError, match="key is not a regular file"):
        read_key(tmp_path / "key")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=f"cannot read {tmp_path}: Is a directory; make one with: poseidon worker "
        "--new_key=FILE$",
    ):
        read_key(tmp_path)


TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "2", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[03-05,07]", "SLURM_JOB_NODELIST": "gpu[01-09]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "4000",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "rank", "size", "local_rank", "master", "port"),
    [
        (TORCHRUN, 5, 8, 1, "node0", 29501),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, 5, 8, 1, "node0", 29500),
        (SLURM, 3, 4, 0, "gpu03", 15_000 + (4711 * 7 + 2) % 15_000),
        ({**SLURM, "MASTER_ADDR": "ib3", "MASTER_PORT": "77"}, 3, 4, 0, "ib3", 77),
        (OPEN_MPI, 1, 2, 0, "10.0.0.1", 4000),
        (HYDRA, 1, 2, 1, "a", 4000),
        (KUBERNETES, 2, 3, 0, "train-0.train", 29500),
        ({**SLURM, **TORCHRUN}, 5, 8, 1, "node0", 29501),
        ({**SLURM, **OPEN_MPI}, 1, 2, 0, "10.0.0.1", 4000),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "9"}, 0, 1, 0, "127.0.0.1", 9),
    ],
)
def test_tasks(
    variables: dict[str, str], rank: int, size: int, local_rank: int, master: str, port: int
) -> None:
    task = task_from(variables)
    assert (task.rank, task.size, task.local_rank) == (rank, size, local_rank)
    assert (task.master, task.port) == (master, port)
    assert task_from(variables, port=123).port == 123


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no RANK and WORLD_SIZE"),
        ({"RANK": "1"}, "no RANK and WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is '8'; expected 0 to 7"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70001; expected 1 to 65535"),
        ({**OPEN_MPI, "MASTER_ADDR": ""}, "MASTER_ADDR is not set: mpirun .*mpirun -x"),
        ({**OPEN_MPI, "MASTER_PORT": ""}, "MASTER_PORT is not set: .*--rendezvous_port"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "but OMPI_COMM_WORLD_SIZE is not set"),
        ({**KUBERNETES, "WORLD_SIZE": ""}, "Kubernetes has started this process"),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "[]"},
            "MASTER_ADDR is not set: srun",
        ),
    ],
)
def test_environments_that_make_no_sense(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task_from(variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[03-07,9],login1", "node03"),
        ("a,b", "a"),
        ("n[12]-ib,x", "n12-ib"),
        ("rack1-n[1-2]", "rack1-n1"),
        ("rack[01-02]n[3-4,7]-ib,login1", "rack01n3-ib"),
        ("tux[2-3][0-5],x", "tux20"),
        ("n[", "n"),
        ("", None),
    ],
)
def test_first_hosts(hosts: str, first: str | None) -> None:
    assert first_host(hosts) == first
