"""The short forms of the methods of torch's ProcessGroup: a tensor in place of a list of one, and
options one by one, as in `group.allreduce(tensor, ReduceOp.MAX)` and `group.broadcast(tensor, 1)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed
Work = TypeVar("Work")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """The options of a short form, by the names that torch's own options have."""

    rootRank: int = 0
    reduceOp: Any = dist.ReduceOp.SUM
    timeout: timedelta | None = None
    """It has no effect: the group's holds."""


_NAMES = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def in_short_too(
    *options: str, of_lists: int | None = None
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Let a method, which takes lists of tensors and then torch's options, have its short form too.

    Args:
        options: that the short form has besides `timeout`, in their order: "root", "op".
        of_lists: which argument has a tensor for each worker, and is a list of such lists in the
            long form: 0 or 1 of two; None: the method has one argument with tensors.
    """
    tensors = 1 if of_lists is None else 2

    def add(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def call(self: Any, *given: Any, opts: Any = None, **named: Any) -> Work:
            lists, rest = list(given[:tensors]), given[tensors:]
            if rest and hasattr(rest[0], "timeout"):  # only torch's options have it
                opts, rest = rest[0], rest[1:]
            if opts is None:
                named = dict(zip((*options, "timeout"), rest, strict=False)) | named
                opts = GivenOptions(
                    **{_NAMES.get(name, name): value for name, value in named.items()}
                )
            if any(isinstance(one, Tensor) for one in lists):
                lists = [_whole(one, index == of_lists) for index, one in enumerate(lists)]
            return method(self, *lists, opts)

        return call

    return add


def _whole(given: Tensor | Sequence[Tensor], is_of_workers: bool) -> list[Any]:
    """Return the argument of a long form."""
    return [given] if isinstance(given, Tensor) or (is_of_workers and given) else []
