"""Learning rates as functions of the iteration, and the counters of iterations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.operators.system.statistics import COMMON
from poseidon.caffe2.proto.caffe2_pb2 import Argument

Policy = Callable[[int], float]
"""The factor of the base rate at an iteration."""
NEVER = 10_000_000


class Arguments:
    """The arguments of a policy; in a part of a composite policy their names have a prefix."""

    def __init__(self, given: dict[str, Argument], prefix: str = "") -> None:
        self.given = given
        self.prefix = prefix

    def real(self, name: str, default: float = 0.0) -> float:
        argument = self.given.get(self.prefix + name)
        if argument is None:
            return default
        return argument.f if argument.HasField("f") else float(argument.i)

    def whole(self, name: str, default: int = 0) -> int:
        return int(self.real(name, default))

    def text(self, name: str) -> str:
        """Return a text, "" where it is not given."""
        argument = self.given.get(self.prefix + name)
        return "" if argument is None else argument.s.decode()


def _fixed(_: Arguments) -> Policy:
    return lambda _: 1.0


def _alter(a: Arguments) -> Policy:
    active, inactive = a.whole("active_period", -1), a.whole("inactive_period", -1)
    first = a.whole("active_first", 1)
    length = active if first else inactive

    def factor(iteration: int) -> float:
        return float((iteration % (active + inactive) < length) == bool(first))

    return factor


def _step(a: Arguments) -> Policy:
    size, gamma = a.whole("stepsize", 1), a.real("gamma", 1.0)
    return lambda iteration: gamma ** (iteration // size)


def _exp(a: Arguments) -> Policy:
    gamma = a.real("gamma", 1.0)
    return lambda iteration: gamma**iteration


def _inv(a: Arguments) -> Policy:
    gamma, power = a.real("gamma"), a.real("power")
    return lambda iteration: float((1 + gamma * iteration) ** -power)


def _poly(a: Arguments) -> Policy:
    power, last = a.real("power"), a.whole("max_iter", -1)

    def rate(iteration: int) -> float:
        found = (1 - iteration / last) ** power
        if isinstance(found, complex):
            raise ValueError(f"the policy poly has no rate at {iteration}, after max_iter {last}")
        return float(found)

    return rate


def _gate(a: Arguments) -> Policy:
    first, second = a.real("multiplier_1", 1.0), a.real("multiplier_2", 1.0)
    count = a.whole("num_iter")
    return lambda iteration: first if iteration < count else second


def _linear_warmup(a: Arguments) -> Policy:
    start, count = a.real("start_multiplier"), a.whole("num_iter")
    return lambda iteration: start + (1 - start) * iteration / count if iteration < count else 1.0


def _constant_warmup(a: Arguments) -> Policy:
    factor, count = a.real("multiplier", 0.5), a.whole("num_iter")
    return lambda iteration: factor if iteration < count else 1.0


def _piece_warmup(a: Arguments) -> Policy:
    first, second, third = a.real("m1", 0.5), a.real("m2", 0.5), a.real("m3", 0.5)
    one, two = a.whole("n1"), a.whole("n2")
    return lambda iteration: first if iteration < one else second if iteration < two else third


def _hill(a: Arguments) -> Policy:
    count, end = a.whole("num_iter"), a.real("end_multiplier")
    rise, fall = _linear_warmup(a), _inv(a)
    return lambda iteration: (
        rise(iteration) if iteration < count else max(end, fall(iteration - count))
    )


def _slope(a: Arguments) -> Policy:
    begin, high = a.whole("num_iter_1"), a.real("multiplier_1")
    end, low = a.whole("num_iter_2"), a.real("multiplier_2")

    def factor(iteration: int) -> float:
        part = (min(max(iteration, begin), end) - begin) / max(end - begin, 1)
        return high + part * (low - high)

    return factor


def _cyclical(a: Arguments) -> Policy:
    base, top = a.real("base_lr"), a.real("max_lr", 0.005)
    return _triangle(base, top, a.whole("stepsize", 1), a.real("decay", 1.0))


def _triangle(base: float, top: float, size: int, decay: float) -> Policy:
    """Return a factor that rises to top / base in `size` iterations and falls, repeatedly.

    Each wave is `decay` times as high as the last.
    """

    def factor(iteration: int) -> float:
        cycle = iteration // (2 * size) + 1
        distance = abs(iteration / size - 2 * cycle + 1)
        return 1 + (abs(top) / abs(base) - 1) * max(0.0, 1 - distance) * decay ** (cycle - 1)

    return factor


def _cosine(a: Arguments) -> Policy:
    """Return half cosines from max to min, each `t_mult` times as long, `lr_shrink` as high."""
    low, high, period = a.real("min_lr", 0.1), a.real("max_lr", 0.5), a.whole("period", 50)
    stretch, shrink = a.real("t_mult", 1.0), a.real("lr_shrink", 0.99)

    def factor(iteration: int) -> float:
        if stretch == 1:
            wave, length = iteration // period, float(period)
            inside = float(iteration - wave * period)
        else:
            wave = math.floor(math.log(1 - iteration / period * (1 - stretch)) / math.log(stretch))
            length = stretch**wave * period
            inside = iteration - (1 - stretch**wave) / (1 - stretch) * period
        height = shrink**wave
        return height * (low + 0.5 * (high - low) * (1 + math.cos(math.pi * inside / length)))

    return factor


def _constant_then_linear(a: Arguments) -> Policy:
    start = a.real("start_warmup_multiplier", 0.1)
    flat = a.whole("constant_warmup_num_iter", NEVER)
    rising = a.whole("linear_warmup_num_iter", NEVER)

    def factor(iteration: int) -> float:
        part = (iteration - flat) / max(rising, 1)
        return 1.0 if iteration >= flat + rising else start + (1 - start) * max(part, 0.0)

    return factor


def _after_warmup(a: Arguments, then: Policy) -> Policy:
    """Return a policy that begins after `constantThenLinearWarmup`."""
    warmup = _constant_then_linear(a)
    begin = a.whole("constant_warmup_num_iter", NEVER) + a.whole("linear_warmup_num_iter", NEVER)
    return lambda iteration: warmup(iteration) if iteration < begin else then(iteration - begin)


def _composite_cyclical(a: Arguments) -> Policy:
    base, top = a.real("base_lr"), a.real("cyclical_max_lr", 0.05)
    size, decay = a.whole("cyclical_step_size", 1_000_000), a.real("cyclical_decay", 1.0)
    return _after_warmup(a, _triangle(base, top, size, decay))


def _composite(a: Arguments) -> Policy:
    """Return a policy of parts in sequence from iteration 1; all see the common iteration."""
    parts: list[tuple[int, float, Policy]] = []
    begin = 1
    for index, count in enumerate(a.given["sub_policy_num_iters"].ints):
        part = Arguments(a.given, f"sub_policy_{index}_")
        parts.append((begin, part.real("lr_scale", 1.0), policy_of(part.text("policy"), part)))
        begin += count

    def factor(iteration: int) -> float:
        _, scale, policy = next((part for part in parts[::-1] if part[0] <= iteration), parts[0])
        return scale * policy(iteration)

    return factor


POLICIES: dict[str, Callable[[Arguments], Policy]] = {
    "fixed": _fixed,
    "alter": _alter,
    "step": _step,
    "exp": _exp,
    "inv": _inv,
    "poly": _poly,
    "gate": _gate,
    "linearWarmup": _linear_warmup,
    "constantWarmup": _constant_warmup,
    "pieceWarmup": _piece_warmup,
    "hill": _hill,
    "slope": _slope,
    "cyclical": _cyclical,
    "cosine": _cosine,
    "constantThenLinearWarmup": _constant_then_linear,
    "compositeCyclical": _composite_cyclical,
    "compositeCosine": lambda a: _after_warmup(
        a, _cosine(Arguments(a.given, f"{a.prefix}cosine_"))
    ),
    "composite": _composite,
}


def policy_of(name: str, arguments: Arguments) -> Policy:
    """Return a policy by its name.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name not in POLICIES:
        raise ValueError(
            f"there is no learning rate policy {name!r}; use one of {', '.join(POLICIES)}"
        )
    return POLICIES[name](arguments)


@operator("LearningRate", gradient=NO_GRADIENT)
class LearningRate:
    """The learning rate of an iteration: `base_lr` times what the policy says."""

    def __init__(self, *, context: Context, base_lr: float, policy: str) -> None:
        self.device = context.device
        self.base = base_lr
        given = {argument.name: argument for argument in context.definition.arg}
        self.policy = policy_of(policy, Arguments(given))

    def __call__(self, iteration: Tensor) -> Tensor:
        """Return the rate, a scalar."""
        if self.device.type == "meta":
            return torch.empty(iteration.shape, device=self.device)
        rate = self.base * self.policy(int(iteration.reshape(-1)[0]))
        return torch.tensor(rate, dtype=torch.float32, device=self.device)


@operator("LearningRateAdaption", gradient=NO_GRADIENT, shapes="one, *S, *S")
def learning_rate_adaption(
    lr: Tensor,
    gradient: Tensor,
    effective: Tensor,
    *,
    lr_alpha: float = 0.01,
    normalized_lr_adaption: bool = True,
) -> Tensor:
    """Return a rate moved by the product of the gradient and the last effective gradient."""
    product = (gradient * effective).sum()
    if normalized_lr_adaption:
        norms = torch.linalg.vector_norm(gradient) * torch.linalg.vector_norm(effective)
        norms = norms.clamp(min=1e-20)
        result: Tensor = lr * (1 - lr_alpha * product / norms)
        return result
    return lr - lr_alpha * product


@operator("Iter", gradient=NO_GRADIENT, inputs=(0, 1))
def iter_(iteration: Tensor | None = None, *, context: Context) -> Tensor:
    """Return the next iteration: the counter counts in place, from 0 where there is none."""
    if iteration is None:
        device = context.device if context.device.type == "meta" else torch.device("cpu")
        return torch.zeros(1, dtype=torch.int64, device=device)
    if context.device.type == "meta":
        return iteration
    return iteration.add_(1)


@operator("AtomicIter", gradient=NO_GRADIENT)
class AtomicIter:
    """Gives the next iteration; the mutex guards the counter.

    The statistics of the process count the calls.
    """

    def __init__(self, *, context: Context) -> None:
        self.name = f"atomic_iter/stats/{context.definition.input[1]}/num_iter".encode()

    def __call__(self, mutex: object, iteration: Tensor) -> Tensor:
        with mutex:  # type: ignore[attr-defined]
            made = iteration.add_(1)
        if made.device.type != "meta":
            COMMON.add(self.name, 1)
        return made
