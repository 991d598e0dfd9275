"""What a script shows as its optimizers step: whether an exchange connects the workers, how many steps
one worker makes without an exchange, and what Hugging Face's Trainer and Lightning
(`poseidon.lightning`) log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from poseidon.base.call_names import LoopPosition
from poseidon.engine.document import ScriptDocument
from poseidon.engine.logged_values import Value, is_name
from poseidon.engine.work import NOTHING
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.torch.process_group.functions import replaced

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


def noticing_lone_steps(document: ScriptDocument, is_joined: Callable[[], bool]) -> RemovableHandle:
    """Warn at an optimizer's first step, within a block, if nothing has joined the workers before."""
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

    return register_optimizer_step_pre_hook(notice)


def counting_steps(context: WorkerContext) -> RemovableHandle:
    """Count the steps, within a block, of the first optimizer that steps, where one worker has no
    exchange.
    """
    counted: dict[int, int] = {}

    def count(optimizer: Optimizer, *_: object) -> None:
        first = next(iter(counted), id(optimizer))
        if not context.loops.begun and first == id(optimizer):
            counted[first] = steps = counted.get(first, 0) + 1
            position = LoopPosition(steps=steps, iterations=steps)
            context.report(position)

    return register_optimizer_step_post_hook(count)


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


TRAINER = "transformers.trainer_callback"
_OF_ONE_RUN = ("epoch", "total_flos", "num_input_tokens_seen")
_TIMES = ("_runtime", "_per_second")
"""What the Trainer logs besides losses and scores."""


Log = Callable[[int, Mapping[str, Value]], None]


def log_of_library(log: Log, iteration: int, values: Mapping[str, Any]) -> None:
    """Log what can be logged of what a library logs, without times and positions. The others are
    left out: the script has not asked for them.
    """
    for name, value in values.items():
        if is_name(name) and name not in _OF_ONE_RUN and not name.endswith(_TIMES):
            with suppress(UsageError):
                log(iteration, {name: value})


@contextmanager
def taking_from_trainer(log: Log) -> Iterator[None]:
    """Log what a Trainer of transformers logs inside the block, at its `global_step`.

    Transformers is looked for as an optimizer steps: it is not imported here.
    """

    has_begun = False

    def begin(*_: object) -> None:
        nonlocal has_begun
        if has_begun or TRAINER not in sys.modules:
            return
        has_begun = True
        handler = sys.modules[TRAINER].CallbackHandler
        on_log = handler.on_log

        @wraps(on_log)
        def logging(self: Any, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> Any:
            log_of_library(log, state.global_step, logs)
            return on_log(self, args, state, control, logs, **more)

        undo.enter_context(replaced(handler, "on_log", logging))

    with ExitStack() as undo:
        undo.enter_context(register_optimizer_step_pre_hook(begin))
        yield
