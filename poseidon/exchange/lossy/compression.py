"""Which tensors are compressed, and how: the text of `--compress` and of
`poseidon.distribute(compress=...)`.

    SCHEME[,SCHEME...]      SCHEME is METHOD or PATTERN=METHOD
    METHOD                  auto[:BUDGET], powersgd:RANK[:int8|:int4][:start=ITERATION], or
                            CODEC[/CODEC] for what workers send, and for what comes back
    CODEC                   int8, int4, sign, topk:FRACTION, randomk:FRACTION, none, or one that is
                            registered (`ps_server.codecs.registry`)

Laws:
* The first scheme that matches a tensor decides. `*`, `?` and `[...]` in a pattern mean what they mean in
  patterns of file names; case counts.
* A pattern matches tensors of any size, and at least one of the job's. A compression without a pattern
  is for all tensors of more than `SMALL_TENSOR_ELEMENTS` elements.
* PowerSGD (`poseidon/exchange/server/low_rank.py`) matches tensors of two axes or more, where it sends at
  most half of their bytes.
* Statistics have no gradient, and are not compressed.
* `auto` takes for each tensor the compression with the fewest bytes among those whose measured loss is
  within the budget. The measure is the largest increase of the final loss over the nets in
  docs/compression.md, against the same training without compression; the median of several seeds counts.
  It is experience, not a bound.
* The choice follows from the shapes and the budget alone: all workers choose the same, and a resumed job
  too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.lossy.low_rank_matrix import ELEMENT_BYTES, POWERSGD, LowRank
from poseidon.exchange.server.placed import SMALL_TENSOR_ELEMENTS
from ps_server import Codec, CodecPair, SpecError
from ps_server.codecs import registry
from ps_server.codecs.blocks import Int4, Int8

AUTO = "auto"


def wire_bytes(compression: CodecPair | LowRank, tensor: Tensor) -> int:
    """Return the bytes that are sent of a tensor, gradient and value together."""
    if isinstance(compression, LowRank):
        return 2 * compression.bytes(tensor)
    ways = (compression.gradients, compression.values)
    return sum(
        ELEMENT_BYTES * tensor.numel() if way is None else way.size(tensor.numel()) for way in ways
    )


def _both(codec: Codec) -> CodecPair:
    return CodecPair(codec, codec)


MEASURED: tuple[tuple[CodecPair | LowRank, float], ...] = (
    (_both(Int8()), 0.005),
    (_both(Int4()), 0.01),
    (LowRank(4, codec=Int8()), 0.1),
)
"""Compressions, and the largest share by which each has raised the final loss of a measured net,
rounded up.
"""


@dataclass(frozen=True, slots=True)
class Auto:
    """The choice of compressions by a loss budget.

    Attributes:
        budget: the largest share by which the measured loss may be above the loss without one,
            such as 0.01.

    Raises:
        UsageError: there is no budget, or it is below the measured share of every compression.
    """

    budget: float | None

    def __post_init__(self) -> None:
        least = min(loss for _, loss in MEASURED)
        if self.budget is None:
            raise UsageError(
                f"--compress={AUTO} needs --loss_budget=F, or {AUTO}:F; expected F such as 0.01 "
                "for 1 % more loss"
            )
        if not (math.isfinite(self.budget) and self.budget >= least):
            raise UsageError(
                f"a loss budget of {self.budget:g} is below the measured loss of every "
                f"compression; give {least:g} or more, or leave out --compress"
            )

    def __str__(self) -> str:
        return AUTO

    def fits(self, tensor: Tensor) -> bool:
        """Return whether there is a compression for a tensor."""
        return tensor.numel() > 0

    def choose(self, tensor: Tensor) -> CodecPair | LowRank:
        """Return the compression of a tensor: that with the fewest bytes, of equal ones that with less
        loss.
        """
        assert self.budget is not None
        allowed = [each for each, loss in MEASURED if loss <= self.budget]
        fitting = [each for each in allowed if not isinstance(each, LowRank) or each.fits(tensor)]
        return min(fitting, key=lambda each: wire_bytes(each, tensor))


NONE = "none"
START = ":start="
NAMES_SHOWN = 8


Compression = CodecPair | LowRank
"""Of a tensor: a codec for each direction, or PowerSGD."""


@dataclass(frozen=True, slots=True)
class CompressionScheme:
    """One part of the text.

    Attributes:
        pattern: of names; empty: every tensor that is large enough.
        compression: of the tensors that match; None: they are not compressed.
    """

    pattern: str
    compression: Compression | Auto | None

    def matches(self, trained: Trained) -> bool:
        """Return whether a tensor with a gradient is meant."""
        if isinstance(self.compression, LowRank | Auto) and not self.compression.fits(
            trained.tensor
        ):
            return False
        if self.pattern:
            return fnmatchcase(trained.name, self.pattern)
        return trained.tensor.numel() > SMALL_TENSOR_ELEMENTS


def parse_compression(text: str, loss_budget: float | None = None) -> tuple[CompressionScheme, ...]:
    """Return the schemes of a text; none of an empty one.

    `auto` has the loss budget, which no other scheme uses.

    Raises:
        UsageError: a part of it is not a scheme.
    """
    parts = text.split(",") if text.strip() else []
    schemes = tuple(_scheme(part.strip(), text, loss_budget) for part in parts)
    if loss_budget is not None and not any(
        isinstance(scheme.compression, Auto) for scheme in schemes
    ):
        raise UsageError(
            f"--loss_budget={loss_budget:g} is for --compress={AUTO}, not "
            f"--compress={text or NONE:.80}"
        )
    return schemes


def _scheme(part: str, text: str, loss_budget: float | None) -> CompressionScheme:
    head, colon, start = part.partition(START)
    pattern, equals, name = head.rpartition("=")
    name += colon + start
    if not name or (equals and not pattern):
        raise UsageError(
            f"--compress={text:.80}: '{part:.60}' is not a scheme; expected a method such as int8, "
            "or PATTERN=METHOD such as fc*=topk:0.01"
        )
    try:
        return CompressionScheme(pattern, _auto(name, loss_budget) or _compression(name))
    except SpecError as error:
        raise UsageError(f"--compress={text:.80}: {error}") from error


def _auto(name: str, loss_budget: float | None) -> Auto | None:
    """Return the choice that `auto` with the flag's budget, or `auto:BUDGET`, asks for; None for
    another compression.
    """
    kind, colon, own = name.partition(":")
    if kind != AUTO:
        return None
    try:
        return Auto(float(own) if colon else loss_budget)
    except ValueError:
        raise SpecError(
            f"'{name:.60}' is not a compression method; expected a number after '{AUTO}:'"
        ) from None


def _compression(name: str) -> Compression | None:
    kind, _, number = name.partition(":")
    if kind != POWERSGD:
        return None if name == NONE else _pair(name)
    factors, colon, start = number.partition(START)
    rank, inner, codec = factors.partition(":")
    if (
        not _is_count(rank)
        or int(rank) < 1
        or (colon and not _is_count(start))
        or (inner and codec not in _DENSE)
    ):
        raise SpecError(
            f"'{name:.60}' is not a compression method; expected {POWERSGD}:RANK with a whole number from 1 "
            f"on, "
            f"or {POWERSGD}:RANK:CODEC with int8 or int4 for the factors, or either with "
            f"{START}ITERATION"
        )
    return LowRank(int(rank), int(start or 0), registry.codec_of(codec) if codec else None)


def _pair(name: str) -> CodecPair:
    for half in name.split("/", 1):
        kind = half.partition(":")[0]
        if kind in (POWERSGD, AUTO):
            raise SpecError(
                f"'{name:.60}' is not a compression method; {kind} has both directions: leave out the '/'"
            )
        if half != NONE and registry.find(kind) is None:
            known = ", ".join([*registry.names(), f"{POWERSGD}:RANK", AUTO, f"or {NONE}"])
            raise SpecError(f"'{half:.60}' is not a compression method; expected {known}")
    return CodecPair.parse(name)


_DENSE = (Int8.name, Int4.name)
"""Codecs of PowerSGD's factors: those that lose little."""


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def compressions_of(
    tensors: Sequence[Trained], text: str, loss_budget: float | None = None
) -> list[Compression | None]:
    """Return the compression of each tensor; None where it has none. `loss_budget` is for `auto`.

    Raises:
        UsageError: the text is not legal, or a pattern matches no tensor.
    """
    schemes = parse_compression(text, loss_budget)
    gradients = [trained for trained in tensors if not trained.statistics]
    for scheme in schemes:
        if scheme.pattern and not any(map(scheme.matches, gradients)):
            names = [trained.name for trained in gradients]
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            raise UsageError(
                f"--compress={text:.80}: no tensor that {scheme.compression or NONE} can take has a name "
                f"like '{scheme.pattern}'; the tensors are {shown}"
            )
    return [_first(schemes, trained) for trained in tensors]


def _first(schemes: Sequence[CompressionScheme], trained: Trained) -> Compression | None:
    if trained.statistics:
        return None
    found = next((scheme.compression for scheme in schemes if scheme.matches(trained)), None)
    return found.choose(trained.tensor) if isinstance(found, Auto) else found
