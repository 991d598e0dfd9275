"""Tensors in memory that processes share, and what is left of it when they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from poseidon.exchange.local.group import HostTree
from poseidon.exchange.local.shared_memory import SharedTensors, new_file


def workers(count: int, tensors: list[list[Tensor]], with_parts: list[bool]) -> list[SharedTensors]:
    """All ends of one memory, as processes would hold them: each by its own descriptor."""
    file = new_file()
    files = [os.dup(file) for _ in range(count)]
    os.close(file)
    return [
        SharedTensors(
            tensors[rank],
            with_parts=with_parts,
            local_rank=rank,
            tree=HostTree.mean(count),
            file=files[rank],
        )
        for rank in range(count)
    ]


def test_the_mean_of_parts_is_made_on_the_leader_and_its_value_reaches_the_others() -> None:
    sizes = [5, 1, 40]
    tensors = [[torch.full((size,), float(rank)) for size in sizes] for rank in range(3)]
    ends = workers(3, tensors, [True, False, True])
    for index in (0, 2):
        for rank in (1, 2):
            ends[rank].contribute(index, torch.full((sizes[index],), 10.0 * rank + index))
        own = torch.ones(sizes[index])
        assert list(ends[0].due(index)) == [index]
        mean = torch.full((sizes[index],), (31.0 + 2 * index) / 3)
        torch.testing.assert_close(ends[0].sums(index, [own])[0], mean)
    for index in range(3):
        ends[0].publish(index)
        tensors[0][index].add_(100)  # may be written to again
        ends[0].published(index)
    for rank in (1, 2):
        for index in range(3):
            ends[rank].receive(index)
            assert tensors[rank][index].tolist() == [0.0] * sizes[index]
    for end in ends:
        end.close()


def test_no_part_is_a_part_of_zeros() -> None:
    tensors = [[torch.zeros(3)] for _ in range(2)]
    leader, other = workers(2, tensors, [True])
    other.contribute(0, torch.ones(3))
    other.contribute(0, None)
    assert leader.sums(0, [torch.ones(3)])[0].tolist() == [0.5] * 3


def test_parts_are_added_in_a_tree() -> None:
    tensors = [[torch.zeros(1)] for _ in range(4)]
    ends = workers(4, tensors, [True])
    for rank, part in ((3, 3.0), (1, -1e8), (2, 1.0)):
        ends[rank].contribute(0, torch.tensor([part]))
    assert ends[0].sums(0, [torch.tensor([1e8])])[0].item() == 1.0


def test_a_worker_without_tensors_has_memory_too() -> None:
    SharedTensors([], with_parts=[], local_rank=0, tree=HostTree.mean(1), file=new_file()).close()


CHILD = """
import os, signal, torch
from poseidon.exchange.local.group import HostTree
from poseidon.exchange.local.shared_memory import SharedTensors, new_file
memory = SharedTensors([torch.ones(1000)], with_parts=[True], local_rank=0, tree=HostTree.mean(2), file=new_file())
memory.publish(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no /dev/shm")
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert set(Path("/dev/shm").iterdir()) <= before
    assert list(tmp_path.iterdir()) == []
