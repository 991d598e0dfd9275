"""Scripts that are written for torch's DistributedDataParallel, run by `poseidon run --ddp`.

The process group "poseidon" takes the place of gloo and NCCL, and the exchange of the job reduces
the gradients: a communication hook of DistributedDataParallel hands it each bucket.

Laws:
* After `backward()` a gradient is the mean over all workers, added in the order of their ranks:
  what `poseidon.distribute` gives a torch optimizer, with the same bits.
* The last bucket's hook waits for all means. By then the backward pass has computed all gradients,
  so nothing waits for it, and an error is raised in the script's `backward()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.engine.module.worker_context import (
    STEP,
    LoopPosition,
    WorkerContext,
    unobserved,
)
from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.process_group.backend import initialize
from poseidon.process_group.mesh import Mesh
from ps_server import Rule, RuleKind, SignalKind

SHARDED = (
    "{} divides the model among the workers, and --ddp is for scripts in which each worker holds "
    "the whole model; expected DistributedDataParallel, or torchrun"
)


class BucketReducer:
    """Reduces the buckets of one DistributedDataParallel module by an exchange.

    Args:
        module: the module.
        context: this worker.
    """

    def __init__(self, module: DistributedDataParallel, context: WorkerContext) -> None:
        first = not context.reducers
        self._on_progress = context.on_progress if first else lambda _: None
        self.module = module
        self._steps = 0
        self._waiting: list[tuple[Any, torch.futures.Future[Tensor]]] = []
        named = {
            name: parameter
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in module.parameters_to_ignore
        }
        self._index = {parameter: index for index, parameter in enumerate(named.values())}
        self._means = [
            torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for parameter in named.values()
        ]
        mean = Rule(kind=RuleKind.MEAN)
        tensors = [
            Trained(name=name, tensor=tensor, rule=mean)
            for name, tensor in zip(named, self._means, strict=True)
        ]
        built = build_exchange(
            tensors,
            ExchangeSettings(),
            context.member,
            context.connect,
            trace=context.trace,
            schemes=context.schemes(list(named)),
        )
        observe = context.observe if first else unobserved
        self._observed = observe(built, module.module)
        self._exchange = self._observed.exchange
        self._exchange.open(None)
        self._exchange.start(0, 0.0)
        self._observed.watch()
        if first:
            context.on_open(built, self._exchange)
        module.register_forward_pre_hook(self._before_forward)
        self._hook = lambda _, bucket: self._reduce(bucket)

    def close(self) -> None:
        """Leave the exchange."""
        self._observed.close()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        """Become the communication hook unless the script has registered one of its own.

        Raises:
            KeyboardInterrupt: the job was asked to stop.
        """
        assert isinstance(module, DistributedDataParallel)
        if not module._comm_hooks:
            module.register_comm_hook(None, self._hook)
        requests = self._exchange.control.requests
        if any(r.kind is SignalKind.STOP and r.clock <= self._steps for r in requests):
            raise KeyboardInterrupt(f"the job was asked to stop after step {self._steps}")

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Send the gradients of a bucket. The last one ends the iteration."""
        if bucket.buffer().is_sparse:
            raise UsageError(
                "a sparse gradient in DistributedDataParallel; expected sparse=False, or "
                "poseidon.distribute"
            )
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._exchange.begin(self._index[parameter], gradient.float().contiguous())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._waiting.append((bucket, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        """End the iteration, and give DistributedDataParallel the means of all buckets, which the
        next iteration waits for.
        """
        self._report(STEP)
        self._exchange.finish()
        self._steps += 1
        self._exchange.start(self._steps, 0.0)
        for bucket, _ in self._waiting:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                index = self._index[parameter]
                self._exchange.wait(index)
                gradient.copy_(self._means[index])
        self._report()
        waiting, self._waiting = self._waiting, []
        for bucket, future in waiting:
            future.set_result(bucket.buffer())

    def _report(self, current: str = "") -> None:
        self._on_progress(
            LoopPosition(steps=self._steps, iterations=self._steps, collection=current)
        )


def reduce_by_exchange(module: DistributedDataParallel, context: WorkerContext) -> None:
    """Let an exchange of its own reduce the gradients of a module over all workers of a job.

    A module over a group of some workers is left to the process group.

    Args:
        module: the module, on all workers.
        context: this worker.
    """
    is_known = any(
        isinstance(known, BucketReducer) and known.module is module for known in context.reducers
    )
    is_of_all = module.process_group is torch.distributed.group.WORLD
    if context.worker.size > 1 and is_of_all and not is_known:
        context.reducers.append(BucketReducer(module, context))


@contextmanager
def ddp_script(mesh: Mesh, context: WorkerContext) -> Iterator[None]:
    """Let a script of DistributedDataParallel that runs inside the block be part of a job.

    `init_process_group` makes the process group "poseidon", whatever backend it names. So does
    `new_group`. Each DistributedDataParallel over all workers is reduced by an exchange of its
    own, one over a group of some workers by all-reduce.

    Args:
        mesh: the messages among the workers.
        context: this worker.
    """
    distributed: Any = torch.distributed
    new_group, construct = distributed.new_group, DistributedDataParallel.__init__

    def init_process_group(*_: Any, **__: Any) -> None:
        initialize(mesh)

    def new_poseidon_group(*arguments: Any, **named: Any) -> Any:
        given = signature(new_group).bind(*arguments, **named).arguments
        return new_group(**{**given, "backend": None})

    def make(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        reduce_by_exchange(self, context)

    modules = (distributed, distributed.distributed_c10d)
    with ExitStack() as undo:
        for owner in modules:
            undo.enter_context(_replaced(owner, "init_process_group", init_process_group))
            undo.enter_context(_replaced(owner, "new_group", new_poseidon_group))
        undo.enter_context(_replaced(DistributedDataParallel, "__init__", make))
        for owner, what in (
            (torch.distributed.fsdp.FullyShardedDataParallel, "FullyShardedDataParallel"),
            (torch.distributed.device_mesh.DeviceMesh, "a DeviceMesh (FSDP2, tensor parallelism)"),
        ):
            undo.enter_context(_replaced(owner, "__init__", _refusal(what)))
        undo.enter_context(_environment(mesh, context))
        yield


def _refusal(what: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(SHARDED.format(what))

    return refuse


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _environment(mesh: Mesh, context: WorkerContext) -> Iterator[None]:
    """Set the variables of torchrun, which such scripts and their libraries read."""
    member = context.member
    values: Mapping[str, object] = {
        "RANK": mesh.rank,
        "WORLD_SIZE": mesh.size,
        "LOCAL_RANK": member.local_rank,
        "LOCAL_WORLD_SIZE": member.local_workers,
        "GROUP_RANK": member.network.rank,
        "TORCHELASTIC_RUN_ID": "poseidon",
        # libraries ask for these; nothing listens there
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
