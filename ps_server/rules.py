"""Update rules: the formulas of Caffe and of torch.optim, once, for the shard, the worker and a
single process, on any device.

Laws:

* A rule is a function of (gradient, history, value, rate, step). It works in place on the flat
  tensors it is given, and reads nothing else. It treats elements alike, so cutting a table into
  chunks changes no bit. Muon alone sees a matrix, which is never cut.
* SGD with momentum, Adam and AdamW of torch are one compiled pass (`ps_server.native`) where an
  example has torch's bits.
* The rules of torch.optim make its operations in its order. On a CPU their bits are torch's, save
  where torch's square root is not correctly rounded.

Symbols: g gradient (regularized, unless the rule decouples the decay), w value, h history, r rate
times the table's rate factor, m momentum. The result is the change d of the value: w <- w + d. It
is left in `gradient`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ps_server import native
from ps_server.protocol.settings import (
    NORM_SEGMENT_ELEMENTS,
    NewtonSchulz,
    Regularization,
    Rule,
    RuleKind,
)
from ps_server.together import Together

History = Sequence[Tensor]

TILE = 128 * 1024
"""Elements that torch is given at a time: gradient, value and history together stay in a cache of
some MB between its operations.
"""
_PARALLEL_ELEMENTS = 32 * 1024
"""From here on torch divides an operation among its threads (its `GRAIN_SIZE`)."""


def history_count(kind: RuleKind) -> int:
    """Return the number of history tensors, each the size of the value, that a rule keeps
    (Caffe's solverstate, and the buffers of torch.optim in their order).
    """
    if kind is RuleKind.MEAN:
        return 0
    two = (RuleKind.ADADELTA, RuleKind.ADAM, RuleKind.TORCH_ADAM, RuleKind.ADAMW)
    return 2 if kind in two else 1


def update(
    rule: Rule, gradient: Tensor, history: History, value: Tensor, *, rate: float, step: int
) -> None:
    """Bring a value to its next one, in place; arguments as for `change`, which does it for all
    but `MEAN`.
    """
    if not update_in_one_pass(rule, Halves(gradient), history, value, rate=rate, step=step):
        _update_by_torch(rule, gradient, history, value, rate=rate, step=step)


def update_together(
    rule: Rule,
    gradients: Sequence[Tensor],
    histories: Sequence[History],
    values: Sequence[Tensor],
    *,
    rate: float,
    step: int,
) -> None:
    """Bring several values of a device to their next ones, as `update` does one by one, with the
    launches of one.

    Args:
        rule: of all; any but `MUON`.
        gradients: flat float32; overwritten.
        histories: of each.
    """
    assert rule.matrix is None, "a matrix is alone"
    parts: list[Any] = [Together(part) for part in (gradients, values)]
    history: list[Any] = [Together(column) for column in zip(*histories, strict=True)]
    _update_by_torch(rule, parts[0], history, parts[1], rate=rate, step=step)


def norm_limit(gradients: Sequence[Tensor], clip: float) -> Tensor:
    """Return what `clip_factor` does for the norm of all gradients, on their device: a float64
    scalar. The host does not wait for it.
    """
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def _update_by_torch(
    rule: Rule, gradient: Tensor, history: History, value: Tensor, *, rate: float, step: int
) -> None:
    if rule.kind is RuleKind.MEAN:
        value.copy_(gradient)
    elif rule.kind is RuleKind.SGD:  # the same bits, and the gradient's memory is not written to
        _regularize(rule, gradient, value)
        value.sub_(_velocity(rule, gradient, history, rate * rule.rate_factor))
    elif rule.kind in _DIRECTIONS or rule.kind.decouples_decay:
        _update_as_torch(rule, gradient, history, value, rate * rule.rate_factor, step)
    else:
        value.add_(change(rule, gradient, history, value, rate=rate, step=step))


class Halves(NamedTuple):
    """A flat float32 gradient: a tensor, or the mean of what two halves add up to.

    Attributes:
        left: the left half, or all.
        right: the right half, if any.
        divisor: what their sum is divided by.
    """

    left: Tensor
    right: Tensor | None = None
    divisor: int = 1

    def write_mean(self, out: Tensor, again: Tensor | None = None) -> None:
        """Write the gradient to a tensor, which may be one of the halves, and to a second one."""
        more = () if again is None else (again,)
        if self.right is None:
            out.copy_(self.left)
        elif native.LIBRARY is not None and (at := _addresses(out, self.left, self.right, *more)):
            out_at, left_at, right_at, *again_at = at
            to = again_at[0] if again_at else None
            native.LIBRARY.mean(out_at, to, left_at, right_at, out.numel(), self.divisor)
            return
        else:
            tiles = (tensor.split(TILE) for tensor in (out, self.left, self.right))
            for total, left, right in zip(*tiles, strict=True):
                torch.add(left, right, out=total).div_(self.divisor)
        if again is not None:
            again.copy_(out)


def _has_one_pass(rule: Rule) -> bool:
    if rule.decay and rule.regularization is not Regularization.L2:
        return False
    match rule.kind:
        case RuleKind.SGD:
            return True
        case RuleKind.TORCH_SGD:
            return rule.momentum != 0.0 and not rule.nesterov
        case RuleKind.TORCH_ADAM | RuleKind.ADAMW:
            return rule.momentum > 0.5  # torch's `lerp` has another formula up to there
    return False


def update_in_one_pass(
    rule: Rule, gradient: Halves, history: History, value: Tensor, *, rate: float, step: int
) -> bool:
    """Bring a value to its next one by compiled code, as `update` does; return False, and do
    nothing, where there is none, or torch has threads for it.
    """
    library = _one_pass_library(rule.kind) if _has_one_pass(rule) else None
    shared = value.numel() >= _PARALLEL_ELEMENTS and torch.get_num_threads() > 1
    if library is None or shared:
        return False
    return _apply(library, rule, gradient, history, value, rate * rule.rate_factor, step)


def _apply(
    library: native.Library,
    rule: Rule,
    gradient: Halves,
    history: History,
    value: Tensor,
    r: float,
    step: int,
) -> bool:
    halves = [half for half in (gradient.left, gradient.right) if half is not None]
    if not (at := _addresses(value, *history, *halves)):
        return False
    own_value, own_history, (left, *right) = at[0], at[1 : -len(halves)], at[-len(halves) :]
    given = (left, right[0] if right else None)
    factors = (gradient.divisor, *_factors(rule, r, step))
    library.update(own_value, own_history, given, value.numel(), factors)
    return True


def _factors(rule: Rule, r: float, step: int) -> tuple[float, ...]:
    """Return the factors of `native.Library.update`, without the first."""
    b1, b2 = rule.momentum, rule.momentum2
    if rule.kind is RuleKind.SGD:
        return rule.decay, b1, r, -1.0
    if rule.kind is RuleKind.TORCH_SGD:
        return rule.decay, b1, 1 - rule.dampening if step else 1.0, -r * _scale(rule)
    decays = (0.0, 1 - r * rule.decay) if rule.kind.decouples_decay else (rule.decay, 1.0)
    corrections = (1 - b1 ** (step + 1), (1 - b2 ** (step + 1)) ** 0.5)
    return (*decays, 1 - b1, b2, 1 - b2, corrections[1], rule.delta, -(r / corrections[0]))


@functools.cache
def _one_pass_library(kind: RuleKind) -> native.Library | None:
    """Return the compiled code if an example has the bits of torch, which multiplies and adds in
    one rounding on some processors only.
    """
    if native.LIBRARY is None:
        return None
    rule = Rule(kind=kind, momentum=0.9, decay=0.1)
    numbers = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 4_099), np.float32))
    results = []
    for library in (native.LIBRARY, None):
        g, w, *history = numbers.clone().abs()
        history = history[: history_count(kind)]
        if library is not None:
            _apply(library, rule, Halves(g), history, w, 0.3, 3)
        else:
            _update_by_torch(rule, g, history, w, rate=0.3, step=3)
        results.append(torch.stack([w, *history]))
    return native.LIBRARY if torch.equal(*results) else None


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Return where the numbers of tensors are; nothing where compiled code cannot use one."""
    if not all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in tensors):
        return ()
    found = tuple(tensor.data_ptr() for tensor in tensors)
    return () if any(address % 4 for address in found) else found


def _update_as_torch(
    rule: Rule, g: Tensor, history: History, value: Tensor, r: float, step: int
) -> None:
    """Apply a rule whose last bit depends on how the change is added."""
    if not rule.kind.decouples_decay:
        _regularize(rule, g, value)
    elif rule.decay:
        value.mul_(1 - r * rule.decay)
    if rule.kind in _DIRECTIONS:
        value.add_(_DIRECTIONS[rule.kind](rule, g, history, step), alpha=-r * _scale(rule))
    else:
        value.add_(_RULES[rule.kind](rule, g, history, r, step))


def change(
    rule: Rule, gradient: Tensor, history: History, value: Tensor, *, rate: float, step: int
) -> Tensor:
    """Turn a gradient into the change of the value.

    Args:
        rule: the rule and its constants; any but `MEAN`, which sets the value.
        gradient: g, flat float32; overwritten with the result.
        history: `history_count(rule.kind)` flat tensors; updated.
        value: w, flat; read only.
        rate: the solver's rate at this step, before the table's own factor.
        step: 0-based number of this update (Adam's bias correction).

    Returns:
        `gradient`, now holding d of w <- w + d.
    """
    r = rate * rule.rate_factor
    decoupled = rule.kind.decouples_decay
    if not decoupled:
        _regularize(rule, gradient, value)
    if rule.kind in _DIRECTIONS:
        direction = _DIRECTIONS[rule.kind](rule, gradient, history, step)
        gradient.copy_(direction).mul_(-r * _scale(rule))
    else:
        _RULES[rule.kind](rule, gradient, history, r, step)
    return gradient.add_(value, alpha=-r * rule.decay) if decoupled and rule.decay else gradient


def _regularize(rule: Rule, g: Tensor, w: Tensor) -> None:
    if rule.decay:
        g.add_(w if rule.regularization is Regularization.L2 else w.sign(), alpha=rule.decay)


def _velocity(rule: Rule, g: Tensor, history: History, r: float) -> Tensor:
    (h,) = history
    return h.mul_(rule.momentum).add_(g, alpha=r)


def _sgd(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    return torch.neg(_velocity(rule, g, history, r), out=g)


def _nesterov(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # d = m h_old - (1 + m) h_new, with h_new = m h_old + r g (Caffe's nesterov_solver).
    (h,) = history
    old = h.clone()
    h.mul_(rule.momentum).add_(g, alpha=r)
    return torch.mul(old, rule.momentum, out=g).sub_(h, alpha=1 + rule.momentum)


def _adagrad(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # h = h + g^2; d = -r g / (sqrt(h) + delta). Duchi et al., JMLR 2011.
    (h,) = history
    h.addcmul_(g, g)
    return g.div_(_square_root(h).add_(rule.delta)).mul_(-r)


def _rmsprop(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # h = p h + (1 - p) g^2; d = -r g / (sqrt(h) + delta). Tieleman and Hinton, 2012.
    (h,) = history
    h.mul_(rule.rms_decay).addcmul_(g, g, value=1 - rule.rms_decay)
    return g.div_(_square_root(h).add_(rule.delta)).mul_(-r)


def _adadelta(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # a = m a + (1 - m) g^2; u = g sqrt((b + delta) / (a + delta)); b = m b + (1 - m) u^2; d = -r u.
    # Zeiler, 2012; Caffe multiplies by the rate, the paper does not.
    a, b = history
    a.mul_(rule.momentum).addcmul_(g, g, value=1 - rule.momentum)
    g.mul_(_square_root((b + rule.delta).div_(a + rule.delta)))
    b.mul_(rule.momentum).addcmul_(g, g, value=1 - rule.momentum)
    return g.mul_(-r)


def _adam(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # Kingma and Ba, 2015, algorithm 1 in the order of its section 2: the correction scales the
    # rate, and delta is added to the uncorrected sqrt(v), as Caffe does.
    m, v = history
    correction = math.sqrt(1 - rule.momentum2 ** (step + 1)) / (1 - rule.momentum ** (step + 1))
    m.mul_(rule.momentum).add_(g, alpha=1 - rule.momentum)
    v.mul_(rule.momentum2).addcmul_(g, g, value=1 - rule.momentum2)
    return torch.div(m, _square_root(v).add_(rule.delta), out=g).mul_(-r * correction)


def _torch_adam(rule: Rule, g: Tensor, history: History, r: float, step: int) -> Tensor:
    # d = -r / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + delta), t = step + 1.
    m, v = history
    b1, b2 = rule.momentum, rule.momentum2
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    root = _square_root(v).div_((1 - b2 ** (step + 1)) ** 0.5).add_(rule.delta)
    return torch.mul(m, -(r / (1 - b1 ** (step + 1))), out=g).div_(root)


def _torch_sgd(rule: Rule, g: Tensor, history: History, step: int) -> Tensor:
    # h = m h + (1 - dampening) g, the first time h = g; then g + m h with Nesterov's momentum.
    if not rule.momentum:
        return g
    (h,) = history
    h.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening if step else 1.0)
    return g.add_(h, alpha=rule.momentum) if rule.nesterov else h


def _lion(rule: Rule, g: Tensor, history: History, step: int) -> Tensor:
    # sign(b1 h + (1 - b1) g); then h = b2 h + (1 - b2) g. Chen et al., 2023, algorithm 2.
    (h,) = history
    direction = (h * rule.momentum).add_(g, alpha=1 - rule.momentum).sign_()
    h.mul_(rule.momentum2).add_(g, alpha=1 - rule.momentum2)
    return direction


def _muon(rule: Rule, g: Tensor, history: History, step: int) -> Tensor:
    # h = m h + (1 - m) g; the orthogonal matrix near h, or near (1 - m) g + m h with Nesterov's.
    assert rule.matrix is not None
    (h,) = history
    h.lerp_(g, 1 - rule.momentum)
    moved = g.lerp_(h, rule.momentum) if rule.nesterov else h
    matrix = _orthogonal(moved.reshape(-1, rule.matrix.columns), rule.matrix, rule.delta)
    return matrix.reshape(g.shape)


def _orthogonal(matrix_NM: Tensor, iteration: NewtonSchulz, least_norm: float) -> Tensor:
    """Return what torch.optim.Muon steps along: bfloat16, N x M, with singular values near 1.

    The bits of bfloat16's products depend on the processor, and may depend on its threads.
    """
    a, b, c = iteration.coefficients
    rows, columns = matrix_NM.shape
    x = matrix_NM.bfloat16()
    x = x.T if rows > columns else x
    x.div_(x.norm().clamp(min=least_norm))
    for _ in range(iteration.steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if rows > columns else x


def _scale(rule: Rule) -> float:
    return 1.0 if rule.matrix is None else rule.matrix.rate_factor


def _square_root(values: Any) -> Any:
    """Return the square roots, correctly rounded.

    On a CPU torch calls MKL for them, whose last bit depends on the vector instructions that it
    takes.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    if isinstance(values, Together):
        return Together([_square_root(each) for each in values.tensors])
    with np.errstate(invalid="ignore"):  # NaN, as torch's
        return torch.from_numpy(np.sqrt(values.numpy()))


_RULES: dict[RuleKind, Callable[[Rule, Tensor, History, float, int], Tensor]] = {
    RuleKind.SGD: _sgd,
    RuleKind.NESTEROV: _nesterov,
    RuleKind.ADAGRAD: _adagrad,
    RuleKind.RMSPROP: _rmsprop,
    RuleKind.ADADELTA: _adadelta,
    RuleKind.ADAM: _adam,
    RuleKind.TORCH_ADAM: _torch_adam,
    RuleKind.ADAMW: _torch_adam,
}
"""The rules that return the change."""
_DIRECTIONS: dict[RuleKind, Callable[[Rule, Tensor, History, int], Tensor]] = {
    RuleKind.TORCH_SGD: _torch_sgd,
    RuleKind.LION: _lion,
    RuleKind.MUON: _muon,
}
"""The rules that return what -r multiplies."""


def squares_of(gradient: Tensor, parts: Sequence[int] = ()) -> list[float]:
    """Return the sums of squared elements in float64 of each segment of `NORM_SEGMENT_ELEMENTS` elements.

    Tables are cut between segments, so the segments do not depend on how; nor do their sums on
    threads.

    Args:
        gradient: flat float32.
        parts: sizes of the tensors that it is made of, each with segments of its own; empty: one.
    """
    found: list[float] = []
    segment = NORM_SEGMENT_ELEMENTS
    for part in gradient.split(list(parts)) if parts else (gradient,):
        whole = len(part) // segment * segment
        if part.device.type != "cpu":
            padded = torch.nn.functional.pad(part, (0, -len(part) % segment))
            found += padded.view(-1, segment).double().square().sum(1).cpu().tolist()
            continue
        squares = np.square(part.numpy(), dtype=np.float64)
        found += squares[:whole].reshape(-1, segment).sum(axis=1).tolist()
        if whole < len(part):
            found.append(float(squares[whole:].sum()))
    return found


def exact_sum(numbers: Iterable[float]) -> tuple[float, ...]:
    """Return a few numbers with the same exact sum; `math.fsum` of all parts of a sum has the same
    bits however it was divided.

    Shewchuk, "Adaptive precision floating-point arithmetic", 1997, theorem 10.
    """
    partials: list[float] = []
    for x in numbers:
        if not math.isfinite(x):
            return (x,)
        kept = 0
        for y in partials:
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low:
                partials[kept] = low
                kept += 1
            x = high
        partials[kept:] = [x]
    return tuple(partials)


def sum_of_squares(gradient: Tensor) -> float:
    """Return the sum of squared elements in float64, so that the norm does not depend on how
    tables are cut.
    """
    return math.fsum(squares_of(gradient))


def plain_sum(numbers: Iterable[float]) -> float:
    """Return the sum of numbers that are added one after another: `sum` has other bits from
    Python 3.12 on.
    """
    return reduce(add, numbers, 0.0)


def clip_factor(total: float, clip: float | None) -> float:
    """Return what to multiply gradients by so that their joint norm is at most `clip` (Caffe's
    ClipGradients).

    Args:
        total: sum of squares over all gradients.
        clip: the limit; None: no limit.
    """
    norm = math.sqrt(total)
    return clip / norm if clip is not None and norm > clip else 1.0
