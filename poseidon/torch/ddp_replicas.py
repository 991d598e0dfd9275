"""Comparisons of the replicas of a DistributedDataParallel module.

Law: the workers compare while they reduce gradients, the one moment that all of them reach
together: a forward pass may be of one worker alone, an evaluation for instance. They compare what
the weights were at the first forward pass with gradients since the reduction before, which are
those after the optimizer's last step: later ones may differ, as with SAM, whose first backward pass
under `no_sync` moves them on each worker for the second one.

Only weights that want a gradient are compared. DistributedDataParallel broadcasts buffers, or the
script has asked it not to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from poseidon.exchange.module_hooks import OfOneModule
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.replicas import ReplicaCheck, checksums
from poseidon.torch.process_group.functions import replaced, standing_for


def reduced_parameters(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients a module reduces, by the first names by which it does:
    torch ignores a shared parameter only by all of its names, and one of the module itself, outside
    of its layers, only by a name with a dot before it.
    """
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.module.named_parameters(remove_duplicate=False):
        known = name if "." in name else f".{name}"
        if parameter.requires_grad and known not in module.parameters_to_ignore:
            names.setdefault(parameter, name)
    return {name: parameter for parameter, name in names.items()}


def has_hook(module: DistributedDataParallel) -> bool:
    """Return whether a module has a communication hook: in Python, one that torch has built in, or
    the one that torch registers in the first forward pass for optimizers that step in `backward()`.
    """
    is_registered = bool(module._get_ddp_logging_data().get("comm_hook"))
    return is_registered or any(hasattr(p, "_in_backward_optimizers") for p in module.parameters())


class DdpReplicas:
    """The replicas of one module, or of a part of it, on all workers that have it.

    Args:
        weights: by name: what is equal on all of them.
        options: how often they are compared, and what a difference does.
        collect, rank, ranks: see `ReplicaCheck`.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Mapping[str, Tensor],
        options: ExchangeOptions,
        *,
        collect: Callable[[bytes], Sequence[bytes]],
        rank: int,
        ranks: Sequence[int],
    ) -> None:
        self._module = ref(module)
        self._options = options
        self._collect = collect
        self._weights = weights
        self._has_run = False
        self._check = ReplicaCheck(
            options,
            state=self._own,
            collect=collect,
            rank=rank,
            ranks=ranks,
            remedy="Change weights, set rates and load the optimizer's state on all workers alike, "
            "use --check_replicas=0 where weights differ on purpose",
        )
        self._next = 0
        self._seen: Mapping[str, str] = {}
        module.register_forward_pre_hook(OfOneModule(self._note_forward))

    def factor(self) -> float:
        """Return by what to multiply means over all workers: 1, and in a script that has asked
        `join(divide_by_initial_world_size=False)` for means over those whose inputs have not ended,
        so. All workers call it together, before `compare`.
        """
        if getattr(self._module(), "_divide_by_initial_world_size", True):
            return 1.0
        active = self._collect(b"\1" if self._has_run else b"\0")
        return len(active) / max(1, active.count(b"\1"))

    def compare(self, steps: int) -> None:
        """Compare the replicas if it is time to. All workers call it together, once in each
        reduction of gradients.

        The first comparisons come after 1, 2, 4, 8, ... reductions: a script may let several of
        them pass before the optimizer's first step.

        Args:
            steps: finished reductions.

        Raises:
            JobError: they differ, and a difference ends the job.
        """
        if self._is_due(steps):
            self._check.run(steps, self._seen)
        self._has_run, self._seen, self._next = False, {}, steps + 1

    def _is_due(self, steps: int) -> bool:
        early = steps > 0 and steps & (steps - 1) == 0
        return early or self._check.is_due(steps)

    def _note_forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and not self._has_run:
            self._has_run = True
            if self._options.check_replicas and self._is_due(self._next):
                self._seen = checksums(self._own())

    def _own(self) -> dict[str, Tensor]:
        """Return the weights to compare. A worker without a forward pass has ended its inputs
        (`Join`): its weights stay behind until the others have ended theirs.
        """
        return {n: p.data for n, p in self._weights.items()} if self._has_run else {}


class ComparedModule:
    """Compares the replicas of a module whose gradients its process group reduces.

    Args:
        options: as `DdpReplicas` takes them.
    """

    def __init__(self, module: DistributedDataParallel, options: ExchangeOptions) -> None:
        self._group = module.process_group
        self._replicas = DdpReplicas(
            module,
            reduced_parameters(module),
            options,
            collect=self._collect,
            rank=torch.distributed.get_rank(),
            ranks=torch.distributed.get_process_group_ranks(self._group),
        )
        self._steps = 0
        self._factor = 1.0
        self._is_hook = False
        module.register_forward_pre_hook(OfOneModule(self._before_forward))

    def _before_forward(self, module: nn.Module, _: object) -> None:
        """Become the communication hook unless the script has registered one of its own."""
        assert isinstance(module, DistributedDataParallel)
        if not self._is_hook and torch.is_grad_enabled() and not has_hook(module):
            self._is_hook = True
            module.register_comm_hook(self._group, lambda _, bucket: self._reduce(bucket))
            module._comm_hooks.clear()  # what torch pickles

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._factor = self._replicas.factor()
        factor, mean = self._factor, allreduce_hook(self._group, bucket)
        if bucket.is_last():
            self._replicas.compare(self._steps)
            self._steps += 1
        return mean if factor == 1.0 else mean.then(lambda done: done.value().mul_(factor))

    def _collect(self, payload: bytes) -> Sequence[bytes]:
        distributed: Any = torch.distributed
        size = distributed.get_world_size(self._group)
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        length = torch.tensor([len(own)], device="cpu")
        lengths = [torch.zeros_like(length) for _ in range(size)]
        distributed.all_gather(lengths, length, group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        parts = [torch.empty_like(padded) for _ in range(size)]
        distributed.all_gather(parts, padded, group=self._group)
        pairs = zip(parts, lengths, strict=True)
        return [part[: int(length)].numpy().tobytes() for part, length in pairs]


def modules_compared(options: ExchangeOptions) -> AbstractContextManager[None]:
    """Compare the replicas of each DistributedDataParallel that is made inside the block, where the
    process group of the workers reduces it.

    Args:
        options: how often, and what a difference does.
    """
    return each_made(lambda module: ComparedModule(module, options))


def each_made(
    use: Callable[[DistributedDataParallel], object],
) -> AbstractContextManager[None]:
    """Use each DistributedDataParallel that is made inside the block."""
    construct = DistributedDataParallel.__init__

    @standing_for(construct)
    def make(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        use(self)

    return replaced(DistributedDataParallel, "__init__", make)
