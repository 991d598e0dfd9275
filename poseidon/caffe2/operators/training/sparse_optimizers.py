"""Updates of those rows of parameters that have gradients; tables are updated in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.sparse.segments import column
from poseidon.caffe2.operators.training.optimizers import (
    ADAM,
    FTRL,
    NO_MOMENTUM,
    Adam,
    Ftrl,
    Momentum,
    adadelta_step,
    adagrad_step,
    counted,
)


def rounds(indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs (rows, positions) such that the rows of a pair are distinct.

    The k-th pair has each index's k-th occurrence: rounds give what a loop over indices gives.

    Args:
        indices: the rows, of any shape; they are flattened.
    """
    rows = indices.reshape(-1).long()
    if not rows.numel():
        return
    ordered, positions = torch.sort(rows, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    counter = torch.arange(rows.numel(), device=rows.device)
    occurrence = counter - torch.cummax(torch.where(first, counter, 0), 0).values
    last = int(occurrence.max())
    if last == 0:
        yield rows, counter
        return
    for number in range(last + 1):
        chosen = positions[occurrence == number]
        yield rows[chosen], chosen


def gradient_rows(gradient: Tensor, indices: Tensor, table: Tensor) -> Tensor:
    """Return the gradient with one row for each index, in the shape of the table's rows.

    Raises:
        ValueError: it has not the indices' first dimensions, or not rows of the table's size.
    """
    row, places = table.shape[1:], indices.dim()
    if gradient.shape[:places] != indices.shape or gradient.shape[places:].numel() != row.numel():
        raise ValueError(
            f"the gradient has the shape {tuple(gradient.shape)}, expected "
            f"{(*indices.shape, *row)}: a row for each index"
        )
    return gradient.reshape(indices.numel(), *row)


@operator("SparseMomentumSGDUpdate", expected="?, N *S, one, N *S")
def sparse_momentum_sgd_update(
    g: Tensor, m: Tensor, lr: Tensor, w: Tensor, indices: Tensor, *, rule: Momentum = NO_MOMENTUM
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps, the momentum and the parameter."""
    steps = torch.empty_like(g)
    given, made = gradient_rows(g, indices, w), gradient_rows(steps, indices, w)
    for rows, positions in rounds(indices):
        step, m[rows] = rule.step(given[positions], m[rows], lr)
        w[rows] -= step
        made[positions] = step
    return steps, m, w


@operator("SparseAdagrad", outputs=(2, 4), expected="N *S, N *S, ?, ?, one")
def sparse_adagrad(
    w: Tensor,
    h: Tensor,
    indices: Tensor,
    g: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return parameter and sums of squares."""
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        old = w[rows]
        w[rows], h[rows], _, _ = adagrad_step(
            old, h[rows], given[positions] + weight_decay * old, lr, epsilon, 1.0
        )
    return w, h


@operator(
    "RowWiseSparseAdagrad", "RowWiseSparseAdagradNoGradOutput", expected="N *, N *, ?, ?, one"
)
def row_wise_sparse_adagrad(
    w: Tensor,
    h: Tensor,
    indices: Tensor,
    g: Tensor,
    lr: Tensor,
    counter: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    weight_decay: float = 0.0,
    counter_halflife: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return parameter and history, which has one number for each row: the sum of means of squares.

    Args:
        w, h: parameter and history.
        indices, g: the rows and their gradients.
        lr: the learning rate.
        counter: the count of updates of each row (`RowWiseCounter`); the decay of a row that has
            one is multiplied by counter_halflife / count.
        epsilon: added to the root of the history.
        weight_decay: of the rows.
        counter_halflife: see `counter`; without effect below 1.
    """
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        part = given[positions]
        if weight_decay:
            decay = _decay(rows, weight_decay, counter, counter_halflife)
            part = part + column(decay, w) * w[rows]
        history = h[rows] + (part * part).reshape(len(part), -1).mean(1).reshape(h[rows].shape)
        h[rows] = history
        w[rows] += lr * part / (column(history.sqrt(), w) + epsilon)
    return w, h


def _decay(rows: Tensor, weight_decay: float, counter: Tensor | None, halflife: int) -> Tensor:
    """Return the weight decay of each row."""
    decay = torch.full(rows.shape, weight_decay, device=rows.device)
    if counter is None or halflife <= 0:
        return decay
    counts = counter.reshape(-1)[rows]
    return torch.where(counts > 0, decay * (halflife / counts), decay).to(decay.dtype)


@operator(
    "SparseAdam", "RowWiseSparseAdam", outputs=(3, 4), expected="N *S, N *S, N *, ?, ?, one, one"
)
def sparse_adam(
    w: Tensor,
    m1: Tensor,
    m2: Tensor,
    indices: Tensor,
    g: Tensor,
    lr: Tensor,
    iteration: Tensor,
    *,
    rule: Adam = ADAM,
    enableRAdam: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, both moments and the gradients that were applied.

    The second moment has the shape of the parameter, or one number for each row: the mean of
    squares. With `enableRAdam` the step is RAdam's.
    """
    steps = torch.empty_like(g)
    given, made = gradient_rows(g, indices, w), gradient_rows(steps, indices, w)
    number = counted(iteration)
    for rows, positions in rounds(indices):
        part = given[positions]
        squares = part * part
        if m2.shape != m1.shape:
            squares = squares.reshape(len(part), -1).mean(1)
        m1[rows], m2[rows], step = rule.step(m1[rows], m2[rows], part, squares, number)
        if enableRAdam:
            step = rule.rectified(step, m1[rows], number)
        w[rows] += lr * step
        made[positions] = step
    return w, m1, m2, steps


@operator("SmartDecaySparseAdam", expected="N *S, N *S, N *S, N *, ?, ?, one, one")
def smart_decay_sparse_adam(
    w: Tensor,
    m1: Tensor,
    m2: Tensor,
    seen: Tensor,
    indices: Tensor,
    g: Tensor,
    lr: Tensor,
    iteration: Tensor,
    *,
    rule: Adam = ADAM,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, both moments and the iteration in which each row had its last gradient.

    The moments decay as if each iteration since then had a gradient of 0; the steps of these
    iterations are made up for with the present second moment. The bias of the moments stays.
    """
    beta1, beta2, now = rule.beta1, rule.beta2, counted(iteration) + 1
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        part = given[positions]
        passed = column((now - seen[rows]).to(w.dtype), w)
        old = m1[rows]
        late = old * beta1 * (1 - beta1 ** (passed - 1)) / (1 - beta1)
        m1[rows] = old * beta1**passed + (1 - beta1) * part
        m2[rows] = m2[rows] * beta2**passed + (1 - beta2) * part * part
        moved = m1[rows] + torch.where(passed > 1, late, 0)
        w[rows] += lr * moved / (m2[rows].sqrt() + rule.epsilon)
        seen[rows] = now
    return w, m1, m2, seen


@operator("SparseAdadelta", expected="N *S, N *S, N *S, ?, ?, one")
def sparse_adadelta(
    w: Tensor,
    h: Tensor,
    d: Tensor,
    indices: Tensor,
    g: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    decay: float = 0.95,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean of squared gradients and mean of squared updates."""
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        w[rows], h[rows], d[rows] = adadelta_step(
            w[rows], h[rows], d[rows], given[positions], lr, epsilon, decay
        )
    return w, h, d


@operator("SparseFtrl", expected="N *S, N *S 2, ?, ?, one")
def sparse_ftrl(
    w: Tensor,
    nz: Tensor,
    indices: Tensor,
    g: Tensor,
    rate: Tensor | None = None,
    *,
    rule: Ftrl = FTRL,
) -> tuple[Tensor, Tensor]:
    """Return parameter and sums."""
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        w[rows], nz[rows] = rule.step(w[rows], nz[rows], given[positions], rate)
    return w, nz


@operator("ScatterWeightedSum", expected="N *, one")
def scatter_weighted_sum(x: Tensor, weight: Tensor, indices: Tensor, *pairs: Tensor) -> Tensor:
    """Return weighted rows, in place: x[i] = w0 x[i] + sum of w_k x_k[i] for the indices i."""
    rows = indices.reshape(-1).long()
    factor = weight.reshape(())
    counts = torch.bincount(rows, minlength=x.shape[0])
    x.mul_(column((factor**counts).to(x.dtype), x))
    for term, amount in zip(pairs[0::2], pairs[1::2], strict=True):
        x.index_add_(0, rows, gradient_rows(term, indices, x) * amount.reshape(()))
    return x


@operator("RowWiseCounter", expected="N *, N *, ?, one")
def row_wise_counter(
    last: Tensor, counts: Tensor, indices: Tensor, iteration: Tensor, *, counter_halflife: int = -1
) -> tuple[Tensor, Tensor]:
    """Return each row's last update's iteration, and its decaying count, both in place.

    Args:
        last: the iteration of the last update of each row.
        counts: the count of each row.
        indices: the rows that are updated now.
        iteration: the present iteration, one integer.
        counter_halflife: the iterations in which a count falls to one half; without effect below 1.
    """
    if counter_halflife > 0:
        before, kept, now = last.view(-1), counts.view(-1), int(iteration)
        for rows, _ in rounds(indices):
            passed = (now - before[rows]).clamp(min=0).to(counts.dtype)
            kept[rows] = 1 + torch.exp2(-passed / counter_halflife) * kept[rows]
            before[rows] = now
    return last, counts


@operator("SparseLpRegularizer", inputs=(2, 3), expected="N *, ?")
def sparse_lp_regularizer(
    param: Tensor,
    indices: Tensor,
    grad: Tensor | None = None,
    *,
    p: float = 2.0,
    reg_lambda: float = 1e-5,
) -> Tensor:
    """Return a parameter some of whose rows are moved towards 0, in place.

    Args:
        param: the parameter.
        indices: its rows; one that comes several times is moved several times.
        grad: the gradient of these rows, without effect.
        p: 2 to scale the rows by 1 - reg_lambda; 1 to move each value by reg_lambda, not beyond 0.
        reg_lambda: the strength.

    Raises:
        ValueError: p is neither 1 nor 2.
    """
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, not {p}")
    rows, times = indices.reshape(-1).long().unique(return_counts=True)
    old, count = param[rows], column(times, param)
    less = old.sign() * (old.abs() - count * reg_lambda).clamp(min=0)
    param[rows] = old * (1 - reg_lambda) ** count if p == 2 else less
    return param
