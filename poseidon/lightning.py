"""Lightning on a job of `poseidon run`: `Trainer(strategy="poseidon")`, `Fabric(strategy="poseidon")`.

    import lightning
    import poseidon.lightning

    trainer = lightning.Trainer(strategy="poseidon", max_epochs=3)

The strategies are Lightning's DDPStrategy, of the Trainer and of Fabric. The workers, their ranks
and devices are the job's; `devices` and `num_nodes` have no effect. The exchange of the job reduces
the gradients, and collectives travel over the process group "poseidon". Under plain `python` the
script trains alone. docs/integrations.md has the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.engine.this_process import current_context
from poseidon.torch.ddp import reduce_by_exchange
from poseidon.torch.script_hooks import log_of_library


class PoseidonEnvironment(ClusterEnvironment):
    """The place of this process in its job, as Lightning asks for it."""

    def __init__(self) -> None:
        self._context = current_context()

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has started all workers."""
        return True

    @property
    def main_address(self) -> str:
        """Nothing listens there."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Nothing listens there."""
        return 29500

    @staticmethod
    def detect() -> bool:
        """Return False: the strategy brings this environment with it."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return self._context.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job has this number."""

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._context.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job has this number."""

    def local_rank(self) -> int:
        """Return the rank of this worker on its host."""
        return self._context.member.seat.local_rank

    def node_rank(self) -> int:
        """Return the rank of the host."""
        return self._context.member.seat.host

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._context.device


class _OfJob:
    """What both strategies take from the job in place of `devices` and `num_nodes`."""

    strategy_name = "poseidon"

    def __init__(self, **arguments: Any) -> None:
        self._place = PoseidonEnvironment()
        strategy: Any = super()
        strategy.__init__(
            cluster_environment=self._place, process_group_backend="poseidon", **arguments
        )

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return self._place.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the DistributedSampler that Lightning puts into DataLoaders."""
        return {"num_replicas": self._place.world_size(), "rank": self._place.global_rank()}

    def set_world_ranks(self) -> None:
        """Tell Lightning which worker logs and writes."""
        functions: tuple[Any, ...] = (rank_zero, fabric_rank_zero)
        for function in functions:
            function.rank_zero_only.rank = self._place.global_rank()

    def setup_distributed(self) -> None:
        """Use the process group of the job, which `poseidon run --ddp` makes here; outside of a job,
        one of this process alone.

        Numbers are drawn as under DDPStrategy: from the seed of `seed_everything` once more.
        """
        reset_seed()
        self.set_world_ranks()
        if not torch.distributed.is_initialized():
            distributed: Any = torch.distributed
            store = distributed.HashStore()
            rank, size = self._place.global_rank(), self._place.world_size()
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def _reduced(self, wrapped: DistributedDataParallel) -> DistributedDataParallel:
        reduce_by_exchange(wrapped, self._place._context)
        return wrapped


class PoseidonStrategy(_OfJob, DDPStrategy):
    """The Trainer's DDPStrategy over the exchange of a job.

    Args:
        arguments: of DDPStrategy and of DistributedDataParallel, as `find_unused_parameters`.
    """

    def setup(self, trainer: Any) -> None:
        """Set up as DDPStrategy does, and log what the Trainer logs, whatever its loggers are."""
        super().setup(trainer)
        connector, log = trainer._logger_connector, self._place._context.job.log
        log_metrics = type(connector).log_metrics  # a second run of the Trainer sets up again

        def logging(metrics: Any, step: int | None = None) -> None:
            if step is None:  # of an evaluation it is the number of a batch
                log_of_library(log, trainer.global_step, metrics)
            log_metrics(connector, metrics, step)

        connector.log_metrics = logging

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._reduced(super()._setup_model(model))


class PoseidonFabricStrategy(_OfJob, FabricDDPStrategy):
    """Fabric's DDPStrategy over the exchange of a job.

    Args:
        arguments: of DDPStrategy and of DistributedDataParallel, as `find_unused_parameters`.
    """

    def _setup_distributed(self) -> None:
        self.setup_distributed()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Return the module in a DistributedDataParallel that the job's exchange reduces."""
        return self._reduced(super().setup_module(module))


for _registry, _strategy in (
    (StrategyRegistry, PoseidonStrategy),
    (STRATEGY_REGISTRY, PoseidonFabricStrategy),
):
    _registry.register(
        _OfJob.strategy_name,
        _strategy,
        description="DDP over the exchange of a job of `poseidon run`",
    )
