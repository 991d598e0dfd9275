"""What the environment of each scheduler says about a task."""

from __future__ import annotations

import pytest

from poseidon.cluster.rendezvous.schedulers import first_host, task_from
from poseidon.errors import UsageError

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
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            5,
            8,
            1,
            "node0",
            29500,
        ),
        (SLURM, 3, 4, 0, "gpu03", 15_000 + (4711 * 7 + 2) % 15_000),
        ({**SLURM, "MASTER_ADDR": "ib3", "MASTER_PORT": "77"}, 3, 4, 0, "ib3", 77),
        (OPEN_MPI, 1, 2, 0, "10.0.0.1", 4000),
        (HYDRA, 1, 2, 1, "a", 4000),
        (KUBERNETES, 2, 3, 0, "train-0.train", 29500),
        ({**SLURM, **TORCHRUN}, 5, 8, 1, "node0", 29501),
        ({**SLURM, **OPEN_MPI}, 1, 2, 0, "10.0.0.1", 4000),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "9"},
            0,
            1,
            0,
            "127.0.0.1",
            9,
        ),
    ],
)
def test_tasks(
    variables: dict[str, str],
    rank: int,
    size: int,
    local_rank: int,
    master: str,
    port: int,
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
        ({**TORCHRUN, "RANK": "8"}, "RANK is '8', expected 0 to 7"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70001, expected 1 to 65535"),
        ({**OPEN_MPI, "MASTER_ADDR": ""}, "MASTER_ADDR is not set: mpirun .*mpirun -x"),
        ({**OPEN_MPI, "MASTER_PORT": ""}, "MASTER_PORT is not set: .*--rendezvous_port"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "but OMPI_COMM_WORLD_SIZE is not set"),
        (
            {**KUBERNETES, "WORLD_SIZE": ""},
            "Kubernetes has started this process, but WORLD_SIZE is not set",
        ),
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
