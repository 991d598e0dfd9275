"""The position of a worker's training loop, with the names of the calls in which it waits for others:
workers report it, the launcher reads it. Other names are those of methods of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTE = "distribute"
"""It waits until all have joined."""
STEP = "step"
"""It ends an iteration."""
MEANS = "means"
"""It waits for the means of the iteration that it has ended."""
LEAVING = "close"
"""It waits at the end of its `with` block."""
VALUES = "values"
"""It uses values, and waits for them until all have ended the steps of that module that it has."""
OF_TORCH = "torch.distributed."
"""How the names of calls begin that loops do not make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPosition:
    """How far a worker's training loop has come.

    Attributes:
        steps: finished.
        iterations: of the exchange, ended. There are more of them than steps where an optimizer's
            step was left out after `average_gradients`.
        collections: waits of the loop for all other workers, begun; without the waits of
            `distribute` and of steps.
        collection: the name of the call that is waiting now, such as `mean`, `settle` or
            `DISTRIBUTE`; `STEP` while an iteration ends, then `MEANS` until its means are there; empty:
            none.
        raised: the exception with which this worker leaves its `with` block; empty: it has none.
        loop: the number of the loop whose call this is; below 0: of none; None: it waits for nobody,
            or a loop has left out iterations that other workers have made, or it is a call of
            torch.distributed after which others have begun.
        loops: `iterations` of each loop of the process.
    """

    steps: int = 0
    iterations: int = 0
    collections: int = 0
    collection: str = ""
    raised: str = ""
    loop: int | None = 0
    loops: tuple[int, ...] = ()
