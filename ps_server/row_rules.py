"""Update rules of row tables, sums of gradients by row, and the first values of rows.

Laws:

* A rule works in place on the rows that have a gradient, and treats rows alike: where a row lies,
  and which others have a gradient, changes no bit.
* Operations are correctly rounded ones of numpy, in a fixed order, so their bits do not depend on a
  processor's vector instructions.

Symbols: g gradient, w value, r rate, t number of the table's iteration from 1, d elements of a row.
Shapes: N rows with a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind

NO_ROWS: RowIds = np.zeros(0, np.uint32)


def update_rows(
    rule: RowRule,
    gradient_Nd: Array,
    history: Sequence[Array],
    value_Nd: Array,
    *,
    rate: float,
    step: int,
) -> None:
    """Bring rows to their next values.

    Args:
        rule: the rule and its constants.
        gradient_Nd: g; it is overwritten.
        history: of the rows, N x `rule.history_widths(d)`; updated.
        value_Nd: w; updated.
        rate: r.
        step: 0-based number of the iteration.
    """
    _RULES[rule.kind](rule, gradient_Nd, history, value_Nd, rate, step + 1)


def _sgd(rule: RowRule, g: Array, history: Sequence[Array], w: Array, rate: float, t: int) -> None:
    g *= np.float32(rate)
    w -= g


def _adam(rule: RowRule, g: Array, history: Sequence[Array], w: Array, rate: float, t: int) -> None:
    # torch.optim.SparseAdam: m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v);
    # w -= r sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps). t counts iterations of the table, with
    # a gradient of the row or not.
    m, v = history
    change = g - m
    change *= np.float32(1 - rule.beta1)
    m += change
    g *= g
    g -= v
    g *= np.float32(1 - rule.beta2)
    v += g
    root = np.sqrt(v)
    root += np.float32(rule.eps)
    np.divide(m, root, out=root)
    root *= np.float32(rate * math.sqrt(1 - rule.beta2**t) / (1 - rule.beta1**t))
    w -= root


def _adagrad(
    rule: RowRule, g: Array, history: Sequence[Array], w: Array, rate: float, t: int
) -> None:
    # h += g^2; w -= r g / (sqrt(h) + eps). Duchi et al., JMLR 2011.
    (h,) = history
    h += g * g
    _scaled_step(rule, g, h, w, rate)


def _row_wise_adagrad(
    rule: RowRule, g: Array, history: Sequence[Array], w: Array, rate: float, t: int
) -> None:
    # h += mean(g^2) over the row; w -= r g / (sqrt(h) + eps). Caffe2's RowWiseSparseAdagrad.
    (h,) = history
    squares = np.ascontiguousarray((g * g).T)
    for more in squares[1:]:  # one after the other: a sum of numpy has bits that depend on shapes
        squares[0] += more
    h += (squares[0] / np.float32(g.shape[1]))[:, None]
    _scaled_step(rule, g, h, w, rate)


def _scaled_step(rule: RowRule, g: Array, h: Array, w: Array, rate: float) -> None:
    root = np.sqrt(h)
    root += np.float32(rule.eps)
    g *= np.float32(rate)
    g /= root
    w -= g


_RULES: dict[RowRuleKind, Callable[[RowRule, Array, Sequence[Array], Array, float, int], None]] = {
    RowRuleKind.SGD: _sgd,
    RowRuleKind.ADAM: _adam,
    RowRuleKind.ADAGRAD: _adagrad,
    RowRuleKind.ROW_WISE_ADAGRAD: _row_wise_adagrad,
}


def sum_by_row(parts: Sequence[tuple[RowIds, Array]], dim: int) -> tuple[RowIds, Array]:
    """Return the rows of all parts, each once in increasing order, and for each the sum of its
    gradients, in the order of the parts and in new memory.

    Args:
        parts: rows in increasing order, and their gradients.
        dim: elements of a row.
    """
    # Runs that are in order merge in one pass; numpy.unique takes thirty times as long.
    rows_N = np.sort(np.concatenate([rows for rows, _ in parts] or [NO_ROWS]), kind="stable")
    rows_N = rows_N[np.concatenate([[True], rows_N[1:] != rows_N[:-1]])[: len(rows_N)]]
    sum_Nd = np.zeros((len(rows_N), dim), np.float32)
    for rows, gradient in parts:
        sum_Nd[np.searchsorted(rows_N, rows)] += gradient
    return rows_N, sum_Nd


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HASHES_OF_NORMAL = 3
"""Hashes of 64 bits with twelve numbers of 16 bits."""


def first_values(init: RowInit, scale: float, seed: int, rows_N: RowIds, dim: int) -> Array:
    """Return the first values of rows, N x `dim`: a function of seed, row and element alone.

    Args:
        init: the distribution.
        scale: of it.
        seed: 0 to 2^63 - 1.
        rows_N: numbers of the rows.
        dim: elements of a row.
    """
    if init is RowInit.ZEROS:
        return np.zeros((len(rows_N), dim), np.float32)
    if init is RowInit.UNIFORM:
        unit = (_hashes(seed, 0, rows_N, dim) >> np.uint64(40)).astype(np.float32)
        unit *= np.float32(2.0**-23)  # 24 bits: exact
        unit -= np.float32(1)
        unit *= np.float32(scale)
        return unit
    total = np.zeros((len(rows_N), dim), np.int64)
    for number in range(_HASHES_OF_NORMAL):
        hashes = _hashes(seed, number, rows_N, dim)
        for shift in (0, 16, 32, 48):
            total += (hashes >> np.uint64(shift)).astype(np.uint16)
    # The variance of a whole number below n is (n^2 - 1) / 12.
    centred = total.astype(np.float64) - 12 * (2**16 - 1) / 2
    return (centred * (scale / math.sqrt(2.0**32 - 1))).astype(np.float32)


def _hashes(seed: int, number: int, rows_N: RowIds, dim: int) -> NDArray[np.uint64]:
    """Return a hash for each element: SplitMix64 (Steele et al., OOPSLA 2014) of seed, number, row
    and column.
    """
    key = _mixed(np.array([seed], np.uint64) * np.uint64(4) + np.uint64(number))
    of_rows = _mixed(rows_N.astype(np.uint64) * _GOLDEN + key)
    columns = np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
    return _mixed(of_rows[:, None] + columns)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
