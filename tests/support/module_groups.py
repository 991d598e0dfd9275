"""Workers on threads that train one torch module together, for comparison with one process with the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from poseidon.engine.module.distribute import join
from poseidon.engine.module.group import Group
from poseidon.engine.module.tensors import DistributeOptions
from poseidon.engine.module.update_rules import UpdateRule
from poseidon.engine.module.worker_context import ThisWorker, WorkerContext
from poseidon.exchange.build import Membership
from tests.support.cluster import TIMEOUT_S, TOKEN, shards_on_sockets

How = UpdateRule | Callable[[nn.Module], torch.optim.Optimizer]
Body = Callable[[nn.Module, Group], None]


def worker_contexts(workers: int, addresses: list[str], member: Membership) -> list[WorkerContext]:
    """Return the context of each worker, over shards at these addresses."""
    return [
        WorkerContext(
            worker=ThisWorker(rank=rank, size=workers),
            member=replace(member, rank=rank, workers=workers, shards=len(addresses), token=TOKEN),
            connect=lambda: addresses,
        )
        for rank in range(workers)
    ]


def together(
    workers: int,
    build: Callable[[int], nn.Module],
    how: How,
    body: Body,
    *,
    options: DistributeOptions | None = None,
    member: Membership | None = None,
    shards: int = 2,
) -> list[dict[str, Tensor]]:
    """Run `body(module, group)` on a thread per worker. Return the `state_dict` of each. One worker trains without shards.

    Args:
        workers: number of workers.
        build: makes the module of a rank.
        how: the rule, or a function that makes the optimizer of a module.
        body: the user's loop.
        options: of `distribute`.
        member: what else the exchange is to know.
        shards: number of shards.
    """
    ends: list[dict[str, Tensor] | None] = [None] * workers
    failures: list[BaseException] = []

    def run(rank: int, context: WorkerContext) -> None:
        try:
            module = build(rank)
            with join(module, _how(how, module), options or DistributeOptions(), context) as group:
                body(module, group)
                group.settle()
                ends[rank] = copy.deepcopy(module.state_dict())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    with ExitStack() as stack:
        places = [WorkerContext()]
        if workers > 1:
            addresses = stack.enter_context(shards_on_sockets(workers, shards))
            places = worker_contexts(workers, addresses, member or Membership(timeout_s=TIMEOUT_S))
        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(places)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [end for end in ends if end is not None]


def _how(how: How, module: nn.Module) -> UpdateRule | torch.optim.Optimizer:
    return how if isinstance(how, UpdateRule) else how(module)
