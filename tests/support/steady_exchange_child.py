"""Two workers and two shards in one process over sockets, with nets; prints the memory cost of
an iteration once warm.

As JSON: `pages` that each iteration touched for the first time, and the bytes that malloc had given
out after each (`in_use`), when all values have come and nothing is on its way. Where malloc maps
large blocks by themselves, and so gives them back at once, the pages of each large block that
torch, numpy, Python or ZeroMQ has taken are counted.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import threading
from itertools import pairwise

import torch
from torch import nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Connect
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Rule
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses

WORKERS, SHARDS, LARGE_LAYERS, BATCH = 2, 2, 2, 4
WIDTH = 1024
WARM_UP, ITERATIONS = 8, 10


MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; each field counts all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def bytes_in_use() -> int:
    """Return the bytes that malloc has allocated and not freed, from its heaps or mapped."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Watch:
    """Called between iterations, when no worker computes and every value has come."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.in_use: list[int] = []

    def __call__(self) -> None:
        self.pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        self.in_use.append(bytes_in_use())


def train(
    kind: ExchangeKind, passes: int, rank: int, connect: Connect, between: threading.Barrier
) -> None:
    """One worker with two large layers and small ones."""
    large = [layer for _ in range(LARGE_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    module = nn.Sequential(*large, nn.Linear(WIDTH, 2))
    factors = layers_with_factors(module)
    rule = Rule(momentum=0.9, decay=0.01)  # others take a temporary of a tile or chunk at a time
    tensors = [
        Trained(name=n, tensor=p, rule=rule, factor_rows=passes * BATCH if p in factors else 0)
        for n, p in module.named_parameters()
    ]
    member = Membership(
        network=Network(rank=rank, size=WORKERS, token=TOKEN, timeout_s=TIMEOUT_S),
        shards=SHARDS,
        options=ExchangeOptions(kind=kind),
    )
    settings = ExchangeSettings(clip=1.0, gradient_scale=1 / passes)
    exchange = build_exchange(tensors, settings, member, connect).exchange
    hooks = Hooks([module], tensors, exchange, passes=passes)
    x = torch.ones(BATCH, WIDTH)
    try:
        exchange.open(None)
        for iteration in range(WARM_UP + ITERATIONS):
            between.wait()
            exchange.start(iteration, 1e-3)
            hooks.start()
            for _ in range(passes):
                module(x).square().mean().backward()
                hooks.next_pass()
            hooks.finish()
            exchange.finish()
            exchange.settle()
        between.wait()
    except BaseException:
        between.abort()
        raise
    finally:
        hooks.close()
        exchange.close()


def main(kind: ExchangeKind, passes: int) -> None:
    """Train, and print the measurements."""
    torch.set_num_threads(1)
    watch = Watch()
    between = threading.Barrier(WORKERS, action=watch)
    with job_addresses(kind, WORKERS, SHARDS) as connect:
        threads = [
            threading.Thread(target=train, args=(kind, passes, rank, connect.of(rank), between))
            for rank in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pages = [after - before for before, after in pairwise(watch.pages[WARM_UP:])]
    print(json.dumps({"pages": pages, "in_use": watch.in_use[WARM_UP:]}))


if __name__ == "__main__":
    main(ExchangeKind(sys.argv[1]), int(sys.argv[2]))
