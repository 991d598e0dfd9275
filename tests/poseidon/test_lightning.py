"""Lightning's strategies inside of a job of `poseidon run --ddp`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import WorkerContext
from poseidon.exchange.membership import Membership
from poseidon.torch.ddp import ddp_script
from poseidon.torch.process_group.functions import register
from poseidon.torch.process_group.mesh import Mesh
from ps_server.network import Network


@pytest.mark.needs("lightning")
def test_the_strategy_makes_the_process_group_of_a_job_that_has_none_yet() -> None:
    from poseidon.lightning import PoseidonStrategy

    network = Network(rank=1, size=2)
    context = WorkerContext(member=Membership(network=network))
    mesh = Mesh(network, lambda payload: [payload])
    register(mesh)
    with ddp_script(mesh, context), running_in(context):
        PoseidonStrategy().setup_distributed()
        try:
            assert torch.distributed.get_rank() == 1
            assert torch.distributed.get_world_size() == 2
        finally:
            torch.distributed.destroy_process_group()
    mesh.close()
