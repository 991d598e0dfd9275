"""What a user of torch has beside plain DistributedDataParallel, and the bytes of each.

    fp16          gradients travel as float16
    powersgd:R    weights travel as two factors of rank R, after two iterations without compression; error feedback, warm start
    post-local:H  gradients stay on their host; weights are averaged every H iterations (post-local SGD)
    diloco:H      a loop without DDP: every H steps an outer optimizer takes the mean change (DiLoCo)

The first three are communication hooks of DDP. Law: pure but for `attach`, which registers a hook,
and its thread, and for `local_rounds`. Each is lossy: plain DDP gets different weights.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from poseidon.observe.plan.scenario import low_rank_elements
from poseidon.observe.plan.shapes import LayerShape

ELEMENT_BYTES, HALF_BYTES = 4, 2
PLAIN_ITERATIONS = 2
"""Iterations of plain DDP before a hook begins: the fewest that PowerSGD takes, because DDP
rebuilds its buckets once.
"""
LEAST_RATE = 2
"""PowerSGD compresses a tensor if that divides its elements by more than this (torch's
`min_compression_rate`).
"""
EPSILON = 1e-8
"""Added to norms in PowerSGD: emulated gradients have rank 1, and a column of zeros has no
direction.
"""


class HookKind(Enum):
    """A communication hook of torch."""

    FP16 = "fp16"
    """`fp16_compress_hook`: gradients travel as float16."""
    POWERSGD = "powersgd"
    """`powerSGD_hook`: gradients travel as two factors of low rank."""
    POST_LOCAL = "post-local"
    """`post_localSGD_hook` with `PeriodicModelAverager`: weights are averaged every H
    iterations.
    """
    DILOCO = "diloco"
    """`local_rounds`: DiLoCo in a few lines of torch (Douillard et al. 2023), without DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A hook with its number.

    Attributes:
        kind: which one.
        number: R of PowerSGD, H of post-local SGD and DiLoCo, at least 1; 0 for fp16.
    """

    kind: HookKind
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Hook:
        """Return the hook of `fp16`, `powersgd:R`, `post-local:H` or `diloco:H`.

        Raises:
            ValueError: the text is not one of these.
        """
        name, _, number = text.partition(":")
        kind = HookKind(name)
        if kind is HookKind.FP16 and number:
            raise ValueError(f"'{text}': fp16 has no number")
        hook = cls(kind=kind, number=int(number) if kind is not HookKind.FP16 else 0)
        if kind is not HookKind.FP16 and hook.number < 1:
            raise ValueError(f"'{text}': expected a number of at least 1")
        return hook

    @property
    def name(self) -> str:
        """The name of the hook in tables."""
        return {
            HookKind.FP16: "fp16",
            HookKind.POWERSGD: f"PowerSGD {self.number}",
            HookKind.POST_LOCAL: f"post-local {self.number}",
            HookKind.DILOCO: f"DiLoCo loop {self.number}",
        }[self.kind]

    @property
    def period(self) -> int:
        """Number of iterations after which the transfers repeat."""
        return self.number if self.kind in (HookKind.POST_LOCAL, HookKind.DILOCO) else 1

    def payload_bytes(self, layers: Sequence[LayerShape]) -> float:
        """Return the bytes that are all-reduced for an iteration: for post-local SGD and DiLoCo a
        mean.
        """
        shapes = [shape for layer in layers for shape in layer.tensors]
        if self.kind is HookKind.FP16:
            return sum(map(math.prod, shapes)) * HALF_BYTES
        if self.kind is HookKind.POWERSGD:
            return sum(low_rank_elements(shape, self.number) for shape in shapes) * ELEMENT_BYTES
        return sum(map(math.prod, shapes)) * ELEMENT_BYTES / self.number


ALL_HOOKS = ("fp16", "powersgd:1", "powersgd:2", "powersgd:4", "post-local:8", "diloco:20")
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo's outer optimizer, as its paper has them."""


class OneAfterTheOther:
    """Runs a hook bucket by bucket, on a thread of its own while the backward pass goes on.

    PowerSGD's all-reduces of a bucket follow each other in callbacks. With NCCL the all-reduces of
    all buckets have one order, the stream's. gloo calls back in any order, so the processes would
    reduce different buckets with each other.

    Args:
        hook: returns the future of a bucket's gradient.
    """

    def __init__(self, hook: Callable[[Any, GradBucket], Future[Tensor]]) -> None:
        self._hook = hook
        self._buckets: queue.Queue[tuple[Any, GradBucket, Future[Tensor]]] = queue.Queue()
        threading.Thread(target=self._run, name="communication hook", daemon=True).start()

    def start(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Queue a bucket. Return the future of its gradient."""
        future: Future[Tensor] = Future()
        self._buckets.put((state, bucket, future))
        return future

    def _run(self) -> None:
        while True:
            state, bucket, future = self._buckets.get()
            try:
                gradient = self._hook(state, bucket).wait()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: DDP raises the error
                future.set_exception(error)
            else:
                future.set_result(gradient)


def attach(net: DistributedDataParallel, hook: Hook) -> Callable[[], None]:
    """Register a hook. Return what the training calls after each step of the optimizer.

    Raises:
        ValueError: DiLoCo is not a hook; see `local_rounds`.
    """
    if hook.kind is HookKind.DILOCO:
        raise ValueError("diloco is not a communication hook of DDP")
    if hook.kind is HookKind.FP16:
        net.register_comm_hook(None, fp16_compress_hook)
    elif hook.kind is HookKind.POWERSGD:
        state = PowerSGDState(
            None,
            matrix_approximation_rank=hook.number,
            start_powerSGD_iter=PLAIN_ITERATIONS,
            min_compression_rate=LEAST_RATE,
            orthogonalization_epsilon=EPSILON,
        )
        in_order = OneAfterTheOther(powerSGD_hook)
        hook = lambda state, bucket: in_order.start(state, bucket)  # noqa: E731, PLW0108 - torch refuses annotations as texts
        net.register_comm_hook(state, hook)
    else:
        local = PostLocalSGDState(None, None, PLAIN_ITERATIONS, post_local_gradient_allreduce=False)
        net.register_comm_hook(local, post_localSGD_hook)
        return _averaging(net, hook.number)
    return lambda: None


def _averaging(net: nn.Module, period: int) -> Callable[[], None]:
    averager = PeriodicModelAverager(period=period, warmup_steps=PLAIN_ITERATIONS)
    return lambda: averager.average_parameters(net.parameters())


def local_rounds(net: nn.Module, period: int) -> Callable[[], None]:
    """Return what a DiLoCo loop calls after each step of the optimizer.

    Every `period` steps the mean over the workers of what the steps have changed is the gradient
    of an outer SGD with Nesterov's momentum, from the weights at the end of the round before.
    """
    weights = list(net.parameters())
    anchors = [weight.detach().clone() for weight in weights]
    outer = torch.optim.SGD(anchors, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    steps = itertools.count(1)

    @torch.no_grad()
    def after_step() -> None:
        if next(steps) % period:
            return
        change = parameters_to_vector(
            [anchor - weight for anchor, weight in zip(anchors, weights, strict=True)]
        )
        distributed.all_reduce(change)
        change /= distributed.get_world_size()
        for anchor, mean in zip(anchors, change.split([a.numel() for a in anchors]), strict=True):
            anchor.grad = mean.view_as(anchor)
        outer.step()
        for weight, anchor in zip(weights, anchors, strict=True):
            weight.copy_(anchor)

    return after_step
