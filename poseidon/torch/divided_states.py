"""States of modules that `fully_shard` has divided among the workers of a host: whole tensors, of which
each worker has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poseidon.engine.leaf import Found, Leaf, Scope, mapped, on_host
from poseidon.exchange.base import is_sharded, like_shard, local_of
from poseidon.exchange.membership import Membership
from poseidon.torch.shards import sum_over_host

PART = "part of a worker"
"""The only key of a mapping that stands for a divided tensor, and has a worker's part of it."""


def whole(value: Any, *, keeps: bool) -> Any:
    """Return a value of dicts, lists, tuples and tensors with whole tensors on the CPU. All workers
    of a host call it together.

    Args:
        keeps: whether this worker needs it; otherwise the tensors are empty.
    """

    def gathered(tensor: Any) -> Tensor:
        if is_sharded(tensor):
            with torch.no_grad():
                tensor = tensor.full_tensor()
        return tensor.detach().cpu().clone() if keeps else torch.empty(0)

    return mapped(value, gathered)


def parts(value: Any) -> Any:
    """Return a value of dicts, lists, tuples and tensors on the CPU, with this worker's parts of
    those that are divided.
    """

    def part(tensor: Tensor) -> object:
        own = local_of(tensor).detach().cpu().clone()
        return {PART: own} if is_sharded(tensor) else own

    return mapped(value, part)


def shared_leaf(name: str, state: Callable[[], Any], *, is_divided: bool, **more: Any) -> Leaf:
    """Return the leaf of a state that all workers share.

    Args:
        state: returns it, with its live tensors.
        is_divided: whether the workers of a host may have divided these.
    """

    def together(keeps: bool, of_plane: bool) -> Any:
        if of_plane:
            return parts(state()) if keeps else None
        return whole(state(), keeps=keeps)

    return Leaf(
        name=name,
        scope=Scope.SHARED,
        read=lambda: on_host(state()),
        together=together if is_divided else None,
        **more,
    )


def leaf_of_parts(
    leaf: Leaf,
    gather: Callable[[Any, bool], Any],
    divide: Callable[[Any], Any],
    mark: Callable[[Any], Any],
    member: Membership,
) -> Leaf:
    """Return a leaf that has whole tensors of this worker's parts. What belongs to a virtual worker
    of its own is a virtual host's, and is at the first of its virtual workers.

    Args:
        leaf: of parts. It takes the values of this worker's virtual workers, in place of others too.
        gather: returns a value of whole tensors; all workers of a host call it together. The flag
            says whether this worker needs it.
        divide: returns the parts of a value of whole tensors, or of what `mark` returns.
        mark: returns a value of this worker as one of parts.
    """
    workers, is_first = member.seat.local_workers, member.seat.local_rank == 0

    def together(keeps: bool, of_plane: bool) -> Any:
        if leaf.scope is Scope.SHARED and of_plane and not keeps:
            return None
        own = leaf.read()
        if leaf.scope is not Scope.VIRTUAL:
            return mark(own) if of_plane else gather(own, keeps)
        if of_plane:
            return list(map(mark, own))
        found = [gather(one, is_first) for one in own]
        return found if is_first else [None] * len(found)

    def of_host(found: Found, number: int) -> Any:
        before = found.each[: number - number % workers + 1]
        return divide(next(value for value in reversed(before) if value is not None))

    def write(found: Found) -> None:
        mine = {number: of_host(found, number) for number in found.own} if found.each else {}
        each = [mine.get(number, mine[found.own[0]]) for number in range(len(found.each))]
        shared = None if found.shared is None else divide(found.shared)
        leaf.write(replace(found, each=each, shared=shared))

    def resize(found: Found) -> Any:
        return leaf.resize(replace(found, each=[one for one in found.each if one is not None]))

    return replace(leaf, together=together, write=write, resize=resize)


def leaf_of_named(
    leaf: Leaf,
    like: Mapping[str, Tensor],
    missing: Callable[[str, Tensor, Mapping[str, Any]], Any],
    member: Membership,
) -> Leaf:
    """Return a leaf that has whole tensors by name of this worker's parts; arguments as for
    `leaf_of_parts` and `_gathered`.
    """
    return leaf_of_parts(
        leaf,
        lambda own, keeps: _gathered(own, like, missing, keeps=keeps),
        lambda value: _divided_by_name(value, like),
        lambda named: {name: {PART: value} for name, value in named.items()},
        member,
    )


def _gathered(
    parts: Mapping[str, Any],
    like: Mapping[str, Tensor],
    missing: Callable[[str, Tensor, Mapping[str, Any]], Any],
    *,
    keeps: bool,
) -> dict[str, Any]:
    """Return parts by name as whole tensors. All workers of a host call it together.

    Args:
        parts: of this worker: tensors, or lists of them; empty: no worker has any, or this one has
            no rows of those that have.
        like: divided tensors by the same names, of all workers of a host.
        missing: returns what this worker has of a tensor without a part here, from the name, a
            tensor without elements, and the parts.
    """
    found: dict[str, Any] = {}
    some = any(sum_over_host(bool(parts), tensor) for tensor in [*like.values()][:1])
    for name, tensor in like.items() if some else ():
        own = parts.get(name)
        if own is None:
            none = torch.empty_like(local_of(tensor), dtype=torch.float32)
            own = missing(name, none, parts)
        sharded = mapped(own, lambda part: like_shard(part.to(tensor.device), tensor))  # noqa: B023
        found[name] = whole(sharded, keeps=keeps)
    return found


def _divided_by_name(found: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return this worker's parts of whole tensors by name, or the parts that stand for them."""
    return {
        name: value[PART]
        if isinstance(value, Mapping)
        else mapped(value, lambda one: part_of(one, like[name]).contiguous())  # noqa: B023
        for name, value in found.items()
        if name in like
    }


def part_of(value: Any, sharded: Tensor) -> Tensor:
    """Return this worker's part of a whole tensor, or the part that stands for it.

    Args:
        sharded: is divided in the same way.
    """
    if isinstance(value, Mapping):
        own: Tensor = value[PART]
        return own
    whole: Tensor = value
    if not is_sharded(sharded):
        return whole
    of: Any = sharded
    dimension = of.placements[0].dim
    each = -(-whole.shape[dimension] // of.device_mesh.size())
    start = min(each * of.device_mesh.get_local_rank(), whole.shape[dimension])
    rows = min(each, whole.shape[dimension] - start)
    return whole.narrow(dimension, start, rows)


def divided(value: Any, like: Any) -> Any:
    """Return a value of dicts, lists, tuples and whole tensors, with its tensors divided.

    Args:
        like: a value of the same form. Its tensors are divided as the result's are to be.

    Raises:
        ValueError: the value has this worker's part of a tensor, and `like` has no divided tensor
            there.
    """
    if isinstance(value, Mapping) and PART in value:
        if not is_sharded(like):
            raise ValueError("it has divided tensors, and the object has none in their places yet")
        return like_shard(part_of(value, like).to(like.device, copy=True), like)
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape:
        return like_shard(part_of(value, like).to(like.device, copy=True), like)
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return {key: divided(part, like.get(key)) for key, part in value.items()}
    if isinstance(value, list | tuple) and isinstance(like, list | tuple):
        parts = [divided(part, other) for part, other in zip(value, like, strict=True)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def of_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state of whole tensors for an optimizer of divided parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = {
        number: dict.fromkeys(state["state"].get(number, {}), parameter)
        for number, parameter in enumerate(parameters)
    }
    return {**state, "state": divided(state["state"], like)}
