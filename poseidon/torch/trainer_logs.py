"""What libraries log, as values that a script logs itself: Hugging Face's Trainer, and Lightning
(`poseidon.lightning`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.engine.logged_values import Value, is_name
from poseidon.errors import UsageError
from poseidon.torch.process_group.functions import replaced

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
        hook = register_optimizer_step_pre_hook(begin)
        undo.callback(hook.remove)
        yield
