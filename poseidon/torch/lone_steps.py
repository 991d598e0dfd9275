"""Steps of optimizers that no exchange connects: a script that trains alone is counted, and one that
was to train together is told how to join the others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from poseidon.engine.document import ScriptDocument
from poseidon.engine.session import LoopPosition
from poseidon.engine.work import NOTHING
from poseidon.engine.worker_context import WorkerContext

LOGGER = logging.getLogger("poseidon.torch.script")
STRATEGIES = {
    "lightning.fabric": 'Fabric(strategy="poseidon") of `import poseidon.lightning`',
    "lightning.pytorch": 'Trainer(strategy="poseidon") of `import poseidon.lightning`',
    "transformers.trainer": "`poseidon run --ddp`",
    "accelerate": "`poseidon run --ddp`",
}
"""How a script of a library joins the others, by a module that the library has imported."""


def _joined_by(document: ScriptDocument) -> str:
    """Return what joins a script of this kind to the other workers."""
    if document.ddp:
        return "DistributedDataParallel"
    used = (way for name, way in STRATEGIES.items() if name in sys.modules)
    return next(used, "poseidon.distribute()")


@contextmanager
def noticing_lone_steps(document: ScriptDocument, is_joined: Callable[[], bool]) -> Iterator[None]:
    """Warn at an optimizer's first step if nothing has joined the workers before it."""
    has_stepped = False

    def notice(*_: object) -> None:
        nonlocal has_stepped
        is_first, has_stepped = not has_stepped, True
        if is_first and not is_joined():
            LOGGER.warning(
                "an optimizer makes a step, but nothing connects the %d workers, so each "
                "trains alone; use %s",
                document.workers,
                _joined_by(document),
            )

    hook = register_optimizer_step_pre_hook(notice)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def counting_steps(context: WorkerContext) -> Iterator[None]:
    """Count the steps of the first optimizer that steps, where one worker has no exchange."""
    counted: dict[int, int] = {}

    def count(optimizer: Optimizer, *_: object) -> None:
        first = next(iter(counted), id(optimizer))
        if not context.loops.begun and first == id(optimizer):
            counted[first] = steps = counted.get(first, 0) + 1
            position = LoopPosition(steps=steps, iterations=steps)
            context.report(position)

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()


def ended_alone(document: ScriptDocument) -> Mapping[str, object]:
    """Warn that a script has ended which nothing has joined to others; return what its worker
    reports.
    """
    if document.workers == 1:
        if document.member.by_worker.count > 1:
            LOGGER.warning(
                "the script has ended without poseidon.distribute(), so --virtual_workers had "
                "no effect"
            )
        return NOTHING
    if document.rank == 0:
        LOGGER.warning(
            "the script has ended without %s: each of the %d workers has run it by itself",
            _joined_by(document),
            document.workers,
        )
    return {"joined": False}
