"""The tensors that workers give a collective: what they have to be, and how they become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from poseidon.errors import UsageError, counted


class ReduceRule(Enum):
    """How the parts of the workers become one."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"
    XOR = "xor"


_INTO: Mapping[ReduceRule, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceRule.SUM: Tensor.add_,
    ReduceRule.MEAN: Tensor.add_,
    ReduceRule.PRODUCT: Tensor.mul_,
    ReduceRule.MIN: lambda own, other: torch.minimum(own, other, out=own),
    ReduceRule.MAX: lambda own, other: torch.maximum(own, other, out=own),
    ReduceRule.AND: Tensor.bitwise_and_,
    ReduceRule.OR: Tensor.bitwise_or_,
    ReduceRule.XOR: Tensor.bitwise_xor_,
}


def reduced(parts: Sequence[Tensor], reduction: ReduceRule) -> Tensor:
    """Return the reduction of tensors of one size and type, in new memory."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _INTO[reduction](result, part.to(wide))
    if reduction is ReduceRule.MEAN:
        # a tensor: a GPU would multiply by the reciprocal of a number
        count = torch.full((), len(parts), dtype=wide, device=result.device)
        # of whole numbers as NCCL: without the fraction
        has_fraction = wide.is_floating_point or wide.is_complex
        result.div_(count, rounding_mode=None if has_fraction else "trunc")
    return result.to(dtype)


class RefusedCall(UsageError, RuntimeError):
    """Wrong arguments of a collective. Scripts catch gloo's, which are RuntimeErrors."""


_REDUCTIONS = {
    "SUM": ReduceRule.SUM,
    "AVG": ReduceRule.MEAN,
    "PRODUCT": ReduceRule.PRODUCT,
    "MIN": ReduceRule.MIN,
    "MAX": ReduceRule.MAX,
    "BAND": ReduceRule.AND,
    "BOR": ReduceRule.OR,
    "BXOR": ReduceRule.XOR,
}


def reduction_of(options: Any, tensors: Sequence[Tensor]) -> ReduceRule:
    """Return how tensors are reduced.

    Raises:
        RefusedCall: the reduction is unknown, or not for tensors of this type.
    """
    reduce_op: Any = torch.distributed.ReduceOp
    operation = options.reduceOp if options is not None else reduce_op.SUM
    for name, reduction in _REDUCTIONS.items():
        if operation == getattr(reduce_op, name):
            for tensor in tensors:
                _check_reduced(reduction, name, tensor)
            return reduction
    raise RefusedCall(
        f"the process group 'poseidon' does not know the reduction {operation}; expected one of "
        f"{', '.join(_REDUCTIONS)}"
    )


def _check_reduced(reduction: ReduceRule, name: str, tensor: Tensor) -> None:
    kind, expected = tensor.dtype, ""
    if reduction in (ReduceRule.AND, ReduceRule.OR, ReduceRule.XOR):
        expected = "whole numbers" if kind.is_floating_point or kind.is_complex else ""
    elif reduction in (ReduceRule.MIN, ReduceRule.MAX):
        expected = "real numbers" if kind.is_complex else ""
    elif reduction is ReduceRule.MEAN:
        expected = "numbers" if kind is torch.bool else ""
    if expected:
        raise RefusedCall(f"the reduction {name} is for {expected}; a tensor is {kind}")
    if tensor.is_sparse and reduction not in (ReduceRule.SUM, ReduceRule.MEAN):
        raise RefusedCall(f"all_reduce of sparse tensors knows SUM and AVG, not {name}")


def described(tensor: Tensor | None) -> str:
    """Return the number of elements of a tensor and their type, for messages."""
    return "" if tensor is None else f"{tensor.numel()} x {str(tensor.dtype)[6:]}"


def check_rank(rank: int, size: int) -> int:
    """Return the rank of a worker of a group.

    Raises:
        RefusedCall: the group has no such worker.
    """
    if not 0 <= rank < size:
        raise RefusedCall(
            f"rank {rank} is outside a group of {counted(size, 'worker')}; give a rank from 0 to "
            f"{size - 1}"
        )
    return rank


def check_one_each(
    call: str, own: Tensor | None, tensors: Sequence[Tensor], size: int, *, only: int | None = None
) -> None:
    """Refuse a list that does not have one tensor for each of so many workers, before anything is
    sent.

    Args:
        own: of whose type and size the tensors are to be; None: of any.
        only: the worker whose tensor is to be so; None: all.

    Raises:
        RefusedCall: it has more or fewer, or one differs.
    """
    if len(tensors) != size:
        raise RefusedCall(
            f"a list has {counted(len(tensors), 'tensor')}; expected one for each of the {size} "
            "workers"
        )
    for other in tensors if only is None else [tensors[only]]:
        if own is not None and (other.dtype != own.dtype or other.numel() != own.numel()):
            raise RefusedCall(
                f"{call} has tensors of {described(own)} and of {described(other)}; expected one "
                "type and size"
            )


def check_own_memory(call: str, tensors: Sequence[Tensor]) -> None:
    """Raise RefusedCall for tensors to write to whose elements share memory, as `expand` gives them."""
    for tensor in tensors:
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RefusedCall(
                f"several elements of a tensor of {call} share memory, as after expand(); give it "
                "a clone()"
            )


def equal_parts(size: int, whole: Tensor) -> list[Tensor]:
    """Return equal parts along the first axis, one for each of so many workers.

    Raises:
        RefusedCall: there are none.
    """
    length = whole.shape[0] if whole.ndim else 1
    if length % size or not whole.ndim:
        raise RefusedCall(
            f"a tensor of shape {list(whole.shape)} cannot be divided equally among {size} "
            f"workers; expected a multiple of {size} as its first dimension"
        )
    return list(whole.split(length // size)) if length else [whole] * size
