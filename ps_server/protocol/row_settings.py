"""The settings of a row table: a matrix whose rows are looked up, and trained, one by one.

Frozen and checked once.

Law: row r is on shard r mod S, and every worker describes a row table alike. First values,
placement and rules follow from the description by pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from ps_server.errors import SpecError

MAX_ROW_TABLES = 4_096
MAX_ROWS = 2**32 - 1
"""A row's number has 32 bits on the wire."""
MAX_ROW_ELEMENTS = 65_536


class RowRuleKind(Enum):
    """The rules of row tables. Each moves only the rows that an iteration has gradients of."""

    SGD = "sgd"
    """w <- w - r g."""
    ADAM = "adam"
    """torch.optim.SparseAdam: the moments of a row change only when it has a gradient."""
    ADAGRAD = "adagrad"
    """torch.optim.Adagrad: an accumulator for each element."""
    ROW_WISE_ADAGRAD = "row_wise_adagrad"
    """AdaGrad with one accumulator a row, of the mean square of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """The rule of a row table and its constants.

    Args:
        kind: the rule.
        beta1: ADAM's decay of the first moment; 0 <= beta1 < 1.
        beta2: ADAM's decay of the second moment; 0 <= beta2 < 1.
        eps: added to the root; 0 or more.
    """

    kind: RowRuleKind = RowRuleKind.SGD
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise SpecError(f"{name} is {value}; expected 0 <= {name} < 1")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise SpecError(f"eps is {self.eps}; expected a number, 0 or more")

    def history_widths(self, dim: int) -> tuple[int, ...]:
        """Return the elements of each history of a row with `dim` elements."""
        match self.kind:
            case RowRuleKind.SGD:
                return ()
            case RowRuleKind.ADAM:
                return dim, dim
            case RowRuleKind.ADAGRAD:
                return (dim,)
            case RowRuleKind.ROW_WISE_ADAGRAD:
                return (1,)


class RowInit(Enum):
    """The first values of rows, which follow from a seed and the row's number."""

    ZEROS = "zeros"
    """All zero."""
    UNIFORM = "uniform"
    """Uniform from -scale to scale."""
    NORMAL = "normal"
    """Of mean 0 and standard deviation `scale`: the sum of twelve uniform numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTableSpec:
    """A row table, the same from every worker.

    Args:
        name: for messages.
        rows: number of rows; 1 to 2^32 - 1.
        dim: float32 elements of a row; 1 to 65,536.
        rule: how rows follow from gradients.
        init: the first values.
        scale: of the first values; a finite number, 0 or more.
        seed: of the first values; 0 to 2^63 - 1.
        staleness: the bound s >= 0: a pull at clock c has every worker's updates of the first c - s
            iterations.
    """

    name: str
    rows: int
    dim: int
    rule: RowRule = field(default_factory=RowRule)
    init: RowInit = RowInit.ZEROS
    scale: float = 1.0
    seed: int = 0
    staleness: int = 0

    def __post_init__(self) -> None:
        for name, most in (("rows", MAX_ROWS), ("dim", MAX_ROW_ELEMENTS)):
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(
                    f"table '{self.name}' has {name} {getattr(self, name)}; expected 1 to {most}"
                )
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise SpecError(
                f"table '{self.name}' has scale {self.scale}; expected a number, 0 or more"
            )
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"table '{self.name}' has seed {self.seed}; expected 0 to 2^63 - 1")
        if not 0 <= self.staleness < 2**31:
            raise SpecError(
                f"table '{self.name}' has staleness {self.staleness}; expected 0 or more"
            )

    @property
    def history_widths(self) -> tuple[int, ...]:
        """Elements of each history of a row."""
        return self.rule.history_widths(self.dim)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row's value and of each of its histories."""
        return self.dim, *self.history_widths

    def rows_on(self, shard: int, shards: int) -> int:
        """Return the number of rows on a shard."""
        return (self.rows - shard + shards - 1) // shards
