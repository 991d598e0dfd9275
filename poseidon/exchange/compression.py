"""Which tensors travel with a lossy codec: the text of `--compress` and of `poseidon.distribute(compress=...)`.

    SCHEME[,SCHEME...]      SCHEME is CODEC or PATTERN=CODEC
    CODEC                   int8, sign, topk:FRACTION, randomk:FRACTION, or none

Laws:

* The first scheme that matches a tensor decides. `*`, `?` and `[...]` of a pattern are those of file names; case counts.
* A pattern matches tensors of any size, and at least one of the job's. A codec without a pattern is for all tensors of more
  than `SMALL_TENSOR_ELEMENTS` elements.
* Statistics have no gradient, and no codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.pooled import SMALL_TENSOR_ELEMENTS
from ps_server import CodecSpec, SpecError

NONE = "none"
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CompressionScheme:
    """One part of the text.

    Attributes:
        pattern: of names; empty: every tensor that is large enough.
        codec: of the tensors that match; None: they are not compressed.
    """

    pattern: str
    codec: CodecSpec | None

    def matches(self, trained: Trained) -> bool:
        """Return whether a tensor with a gradient is meant."""
        if self.pattern:
            return fnmatchcase(trained.name, self.pattern)
        return trained.tensor.numel() > SMALL_TENSOR_ELEMENTS


def parse_compression(text: str) -> tuple[CompressionScheme, ...]:
    """Return the schemes of a text; none of an empty one.

    Raises:
        UsageError: a part of it is no scheme.
    """
    return tuple(_scheme(part.strip(), text) for part in text.split(",")) if text.strip() else ()


def _scheme(part: str, text: str) -> CompressionScheme:
    pattern, equals, name = part.rpartition("=")
    if not name or (equals and not pattern):
        raise UsageError(
            f"--compress={text:.80}: '{part:.60}' is no scheme; expected a codec such as int8, or PATTERN=CODEC such as "
            "fc*=topk:0.01"
        )
    try:
        return CompressionScheme(pattern, None if name == NONE else CodecSpec.parse(name))
    except SpecError as error:
        raise UsageError(f"--compress={text:.80}: {error}, or {NONE}") from error


def codecs_of(tensors: Sequence[Trained], text: str) -> list[CodecSpec | None]:
    """Return the codec of each tensor; None where it has none.

    Raises:
        UsageError: the text is not legal, or a pattern matches no tensor.
    """
    schemes = parse_compression(text)
    gradients = [trained for trained in tensors if not trained.statistics]
    for scheme in schemes:
        if scheme.pattern and not any(map(scheme.matches, gradients)):
            names = [trained.name for trained in gradients]
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            raise UsageError(
                f"--compress={text:.80}: no tensor has a name like '{scheme.pattern}'; the tensors are {shown}"
            )
    return [_first(schemes, trained) for trained in tensors]


def _first(schemes: Sequence[CompressionScheme], trained: Trained) -> CodecSpec | None:
    if trained.statistics:
        return None
    return next((scheme.codec for scheme in schemes if scheme.matches(trained)), None)
