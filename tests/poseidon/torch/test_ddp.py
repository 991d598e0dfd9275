"""torch.distributed inside of a job of one worker; `tests/distributed/test_ddp_scripts.py` has
several.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.torch.ddp import ddp_script, default_group
from poseidon.torch.options import Buffers
from poseidon.torch.process_group.functions import register
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.tensors import module_tensors
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    own = Mesh(Network(), lambda payload: [payload])
    register(own)
    yield own
    own.close()


@contextmanager
def destroyed_at_end() -> Iterator[None]:
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_script_has_a_default_group(mesh: Mesh) -> None:
    with default_group(mesh), destroyed_at_end():
        tensor = torch.ones(3)
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]
        of_graphs = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(
                tensor, "sum", torch.distributed.group.WORLD.group_name
            )
        )
        assert of_graphs.tolist() == [1, 1, 1]
        assert len(DistributedSampler(range(5))) == 5  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"have a process group already; use .* --ddp"):
            torch.distributed.init_process_group("gloo")


def test_a_script_of_ddp_makes_the_group_itself(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    before = torch.distributed.init_process_group, DistributedDataParallel.__init__
    signatures = [inspect.signature(one) for one in before]
    known = inspect.getfullargspec(DistributedDataParallel)
    with ddp_script(mesh, WorkerContext()):
        now = torch.distributed.init_process_group, DistributedDataParallel.__init__
        assert now != before
        # libraries pass only arguments that they find there
        assert [inspect.signature(one) for one in now] == signatures
        assert inspect.getfullargspec(DistributedDataParallel) == known
        assert not torch.distributed.is_initialized()
        torch.distributed.init_process_group(
            "nccl", rank=0, world_size=1, timeout=timedelta(hours=2)
        )
        with destroyed_at_end():
            assert torch.distributed.get_backend() == "nccl"
            store = torch.distributed.distributed_c10d._get_default_store()
            assert store.timeout == timedelta(hours=2)  # type: ignore[attr-defined]
            model = DistributedDataParallel(nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            assert copy.deepcopy(model)(torch.ones(1, 2)).shape == (1, 1)
            torch.distributed.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
            with pytest.raises(UsageError, match=r"has a DistributedDataParallel, which averages"):
                module_tensors(nn.Sequential(model), Buffers.AVERAGE)
    assert (torch.distributed.init_process_group, DistributedDataParallel.__init__) == before


def test_a_module_of_ddp_has_one_virtual_worker_a_worker(mesh: Mesh) -> None:
    member = Membership(virtual_workers=VirtualWorkers((0, 2)))
    with ddp_script(mesh, WorkerContext(member=member)):
        torch.distributed.init_process_group()
        with (
            destroyed_at_end(),
            pytest.raises(UsageError, match="2 virtual workers on 1 worker"),
        ):
            DistributedDataParallel(nn.Linear(2, 1))
