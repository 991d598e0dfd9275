"""Compiled code for the codecs (`ps_server.codecs`), for PowerSGD
(`poseidon.exchange.lossy.low_rank_matrix`) and for shards (`ps_server.rules`): a pass over memory
where torch takes up to six, and the same bits.

Why C, called by ctypes: no kernel of torch has these formats with their rounding and their order of
sums. numba could, and adds 208 MB to an installation and a second to each start. A small file of C
needs a compiler where the package is built, and nothing where it runs: no headers of Python, so
that one library fits every version; calls release the GIL; `compile.py` leaves it out where there
is no compiler.

Laws:

* The sources are checked: a library that was made of other texts is not used.
* Callers pass arrays that `fits` accepts, and encoded bytes that `Codec.check` accepts.
* A codec is looked up by its name: `codec_NAME_compress` and so on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps_server.native.compile import SOURCES, digest

LIBRARY_FILE = Path(__file__).with_name("codecs.so")

Array = NDArray[np.float32]
Encoded = NDArray[np.uint8]


class Level(IntEnum):
    """The instructions that a call uses; `library.c` has the same numbers."""

    PLAIN = 0  # what every processor of the architecture has
    AVX2 = 1
    AVX512 = 2


class Part(NamedTuple):
    """What a call needs to know of a chunk.

    Attributes:
        total: its elements.
        sent: elements that are sent of a whole segment, where these are not all.
        last: the same of a shorter last segment.
        table: with `segment` and `clock`, the key of the positions that are drawn.
        segment: the number of the chunk's first segment.
        clock: the iteration.
    """

    total: int
    sent: int
    last: int
    table: int
    segment: int
    clock: int


class Twin:
    """The compiled operations of a codec; `Coder` has the same ones and says what they do.

    Args:
        code: the library.
        name: of the codec.
        level: at most the processor's.

    Raises:
        AttributeError: the library has no such codec.
    """

    def __init__(self, code: ctypes.CDLL, name: str, level: Level) -> None:
        self._level = level
        part = [ctypes.c_size_t] * 3 + [ctypes.c_uint64] * 3
        self._compress = _function(code[f"codec_{name}_compress"], 3, part)
        self._follow = _function(code[f"codec_{name}_follow"], 3, part)
        self._add = _function(code[f"codec_{name}_add"], 2, part)
        self._average = _function(code[f"codec_{name}_average"], 2, [ctypes.c_size_t, *part])

    def compress(self, left: Array, given: Array, out: Encoded, part: Part) -> None:
        """See `Coder.compress`."""
        self._compress(self._level, _at(left), _at(given), _at(out), *part)

    def follow(self, own: Array, value: Array, out: Encoded, part: Part) -> None:
        """See `Coder.follow`."""
        self._follow(self._level, _at(own), _at(value), _at(out), *part)

    def add(self, out: Array, encoded: Encoded, part: Part) -> None:
        """See `Coder.add`."""
        self._add(self._level, _at(out), _at(encoded), *part)

    def average(self, out: Array, pushes: Sequence[Encoded], part: Part) -> None:
        """See `Coder.average`."""
        addresses = (ctypes.c_void_p * len(pushes))(*map(_at, pushes))
        self._average(self._level, _at(out), addresses, len(pushes), *part)


class Library:
    """The compiled operations.

    Args:
        code: the library.
        level: at most the processor's.
    """

    def __init__(self, code: ctypes.CDLL, level: Level) -> None:
        self.level = level
        self._code = code
        self._twins: dict[str, Twin | None] = {}
        sides = [ctypes.c_size_t] * 2
        self._orthonormal = _function(code.low_rank_orthonormal, 3, [*sides, ctypes.c_double])
        number, size = ctypes.c_float, ctypes.c_size_t
        self._mean = _function(code.rules_mean, 4, [size, number])
        self._sgd = _function(code.rules_sgd, 4, [size, *[number] * 5])
        self._adam = _function(code.rules_adam, 5, [size, *[number] * 9])
        self._product = _function(code.low_rank_product, 4, [*sides, ctypes.c_size_t])

    def twin(self, name: str) -> Twin | None:
        """Return the compiled codec of a name; None: there is none."""
        if name not in self._twins:
            try:
                self._twins[name] = Twin(self._code, name, self.level)
            except AttributeError:
                self._twins[name] = None
        return self._twins[name]

    def orthonormal(self, p: Array, out: Array, dependent: float) -> None:
        """Write orthonormal columns that span the rows of `p`, r x n, to `out`, n x r.

        A column of which no more than the part `dependent` is left is written as zeros.
        """
        r, n = p.shape
        scratch = np.empty((r + 1, n), np.float64)
        self._orthonormal(self.level, _at(p), _at(out), _at(scratch), r, n, dependent)

    def product(self, b: Array, q: Array, left: Array, out: Array) -> None:
        """Write `b` times `q` to `out`, and subtract it from `left`: n x r, r x m, n x m."""
        (n, r), m = b.shape, q.shape[1]
        self._product(self.level, _at(b), _at(q), _at(left), _at(out), n, m, r)

    def mean(
        self, out: int, again: int | None, left: int, right: int, size: int, count: int
    ) -> None:
        """Write (left + right) / count to `out`, which may be one of them, and to `again`: addresses
        of so many floats.
        """
        self._mean(self.level, out, again, left, right, size, count)

    def update(
        self,
        value: int,
        history: Sequence[int],
        gradient: tuple[int, int | None],
        size: int,
        factors: Sequence[float],
    ) -> None:
        """Apply SGD with momentum, or Adam where there are two histories: addresses of so many
        floats.

        Args:
            value: w.
            history: h; or m and v.
            gradient: g; or two halves, for their sum divided by a number.
            size: elements of each.
            factors: that number and decay d of g' = g + d w. Then m, a and b of h <- m h + a g',
                w <- w + b h. Or k, a, b, c, e, delta and f of m <- m + a (g' - m), v <- b v + c
                g'^2, w <- k w + f m / (sqrt(v) / e + delta).
        """
        function = self._sgd if len(history) == 1 else self._adam
        function(self.level, value, *history, *gradient, size, *factors)


def _function(function: Any, pointers: int, others: list[Any]) -> Any:
    """Declare a function of the library: its first argument is the level."""
    function.restype = None
    function.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * pointers + others
    return function


def _at(array: NDArray[Any]) -> int:
    return array.ctypes.data


def fits(out: NDArray[Any], *others: NDArray[Any]) -> bool:
    """Return whether the compiled code can work on these arrays: without gaps, aligned."""
    return out.flags.carray and all(a.flags.c_contiguous and a.flags.aligned for a in others)


def load(level: Level | None = None) -> Library | None:
    """Return the compiled code.

    Args:
        level: the instructions to use, if the processor has them; None: the highest.

    Returns:
        None where it was not compiled, or from other texts than the sources have.
    """
    try:
        code = ctypes.CDLL(str(LIBRARY_FILE))
    except OSError:
        return None
    own = ctypes.c_char_p.in_dll(code, "codecs_source").value
    if SOURCES and (own or b"").decode() != digest(SOURCES):
        return None
    highest = Level(code.codecs_level())
    return Library(code, highest if level is None else min(level, highest))


LIBRARY = load()
"""The compiled code of this process; None: codecs compute with torch."""
