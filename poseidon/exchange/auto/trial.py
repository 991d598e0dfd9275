"""The measurement of `--exchange=auto`: all workers exchange zeros by each scheme, before training.

Workers join the shards with a trial store (`StoreSpec.trial`), and measure

    the server      pushes of a small tensor, of a large one, and of several together, until all new values have come
    all-reduce      the same tensors through connections between the workers
    factors         products of factors with as many rows as the job's, and the updates that follow

Training runs the same code, on tensors of the same devices: on GPUs the copies to and from the host
count for each scheme. All workers measure at the same time. On CPUs each worker computes meanwhile,
with as many threads as in training: there an exchange costs what it takes from the computation,
too. The processor time of all-reduce tells how much that is. Several tensors travel together, so
that a shard sums one while the next one is on the link, as in training. All workers collect all
figures and take the slowest of each, so every worker has the same. It takes some tenths of a
second; on links below 250 Mbit/s some seconds.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from poseidon.exchange.allreduce.sums import Sums
from poseidon.exchange.auto.rates import Rates
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.cost import ELEMENT_BYTES, Topology, server_bytes
from poseidon.exchange.device import device_of
from poseidon.exchange.factors.products import Scratch, apply_factors
from poseidon.exchange.membership import Membership
from poseidon.exchange.peers import Peers
from poseidon.exchange.server.tables import ServerTables
from ps_server import Client, RemoteProtocolError, Rule, RuleKind, StoreSpec, TableSpec
from ps_server.json_fields import value_of
from ps_server.numerics import prepare_thread
from ps_server.protocol.virtual_workers import VirtualWorkers
from ps_server.rules import history_count, update

WORTH_MEASURING = 2**20
"""Elements of a net. An exchange of a smaller one takes some milliseconds by any scheme, less than
a measurement could save in many iterations.
"""
SMALL_ELEMENTS, LARGE_ELEMENTS, LARGE_TENSORS = 2**16, 2**20, 5
"""The most of each tensor: one of 256 KiB, and five of 4 MiB, each of several chunks."""
SMALL, LARGE, ALL_LARGE = range(1), range(1, 2), range(1, 1 + LARGE_TENSORS)
"""The tensors that are exchanged together.

What a byte takes follows from the times of the last two: thus the time in which the first and the
last chunk are alone on the link does not count. In training they are not alone.
"""
TOGETHER = (SMALL, LARGE, ALL_LARGE)
MOST_RUNS = 5
RUNS_S = 0.3
"""How long the runs of one scheme take, about, unless one takes longer. After a
first one that takes longer there are none.
"""
SIDE = 1024
LOAD_SIDE = 256
"""The side of the matrices whose products keep the processors busy, less than 1 ms each."""
LEAST_ROWS, MOST_ROWS = 16, 256
PRODUCTS = 3


def is_worth_measuring(tensors: Sequence[Trained]) -> bool:
    """Return whether a net is large enough for the schemes to differ."""
    return _elements(tensors) >= WORTH_MEASURING


def _elements(tensors: Sequence[Trained]) -> int:
    return sum(trained.tensor.numel() for trained in tensors)


def trial_sizes(tensors: Sequence[Trained], planes: int = 1) -> list[int]:
    """Return the elements of each tensor of the measurement: on a host together at most the net's.
    Each of its planes has a part of each.
    """
    large = min(LARGE_ELEMENTS, max(SMALL_ELEMENTS, _elements(tensors) // LARGE_TENSORS))
    return [-(-size // planes) for size in [SMALL_ELEMENTS, *[large] * LARGE_TENSORS]]


def trial_store(tensors: Sequence[Trained], member: Membership) -> StoreSpec:
    """Return the store of the measurement, the same on every worker.

    It has the rule of the job's largest tensor that may be cut.
    """
    rule = _rule_of(tensors)
    return StoreSpec(
        workers=member.network.size,
        hosts=member.hosts,
        shards=member.shards,
        tables=tuple(
            TableSpec(name=f"trial {number}", size=size, rule=rule, plane=plane)
            for plane in range(member.seats.planes)
            for number, size in enumerate(trial_sizes(tensors, member.seats.planes))
        ),
        loads=member.loads,
        chunks=member.chunks,
        trial=True,
    )


def _rule_of(tensors: Sequence[Trained]) -> Rule:
    trained = [t for t in tensors if not t.statistics and t.rule.matrix is None]
    found = max(trained, key=lambda t: t.tensor.numel(), default=None)
    return Rule() if found is None or found.rule.kind is RuleKind.MEAN else found.rule


def measure(client: Client, tensors: Sequence[Trained], member: Membership) -> Rates:
    """Measure all schemes. All workers call it together.

    Args:
        client: not yet started, with the trial store.
        member: of the job.
    """
    with (
        _served(client, tensors, member) as by_server,
        _sums(client, tensors, member) as by_allreduce,
        computing(tensors[0].tensor.device) as computed_s,
    ):
        meter = _ProcessorMeter(by_allreduce, computed_s)
        (server_s, server_s_per_byte), (allreduce_s, allreduce_s_per_byte) = _by_turns(
            client, [by_server, meter.run], trial_sizes(tensors)
        )
    products = _product_s_per_flop(client, tensors, member)
    link = server_bytes(2**20, Topology.of_job(member)) / (ELEMENT_BYTES * 2**20)
    figures: dict[str, float] = {
        "server_s": server_s,
        "server_s_per_byte": server_s_per_byte,
        "allreduce_s": allreduce_s,
        "allreduce_s_per_byte": allreduce_s_per_byte,
        "link_s_per_byte": server_s_per_byte / link,
        "product_s_per_flop": products,
        "busy": meter.busy,
    }
    try:
        return Rates.slowest([value_of(Rates, each) for each in _collect(client, figures)])
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError("a worker did not send its measured rates") from error


@contextlib.contextmanager
def computing(device: torch.device) -> Iterator[Callable[[], float] | None]:
    """Keep the process's threads busy with products of matrices, where the device is a CPU.

    Yield what returns the processor seconds of this so far; None on an accelerator.
    """
    if device.type != "cpu":
        yield None
        return
    ended = threading.Event()
    thread = threading.Thread(target=_compute, args=(ended,), name="poseidon-load", daemon=True)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    try:
        yield lambda: time.clock_gettime(clock)
    finally:
        ended.set()
        thread.join()


class _ProcessorMeter:
    """Measures which part of the processors that compute an exchange uses.

    Args:
        computed_s: of `computing`.
    """

    def __init__(
        self, exchange: Callable[[range], None], computed_s: Callable[[], float] | None
    ) -> None:
        self._exchange = exchange
        self._computed_s = computed_s
        self._used_s = self._whole_s = 0.0

    def run(self, tables: range) -> None:
        """Exchange tensors."""
        computed_s = self._computed_s or (lambda: 0.0)
        began_s, used_s = time.perf_counter(), time.process_time() - computed_s()
        self._exchange(tables)
        self._used_s += time.process_time() - computed_s() - used_s
        self._whole_s += time.perf_counter() - began_s

    @property
    def busy(self) -> float:
        """The part, 0 to 1; 0 where an accelerator computes."""
        if self._computed_s is None:
            return 0.0
        return min(1.0, max(0.0, self._used_s / self._whole_s / torch.get_num_threads()))


def _compute(ended: threading.Event) -> None:
    prepare_thread()
    one, other = torch.zeros(LOAD_SIDE, LOAD_SIDE), torch.zeros(LOAD_SIDE, LOAD_SIDE)
    product = torch.zeros(LOAD_SIDE, LOAD_SIDE)
    while not ended.is_set():
        torch.mm(one, other, out=product)


def _collect(client: Client, own: Mapping[str, Any], *, whole: bool = True) -> list[dict[str, Any]]:
    gathered = client.gather(json.dumps(own).encode(), whole=whole)
    return [json.loads(payload) for payload in gathered.result()]


@contextlib.contextmanager
def _served(
    client: Client, tensors: Sequence[Trained], member: Membership
) -> Iterator[Callable[[range], None]]:
    """Start the trial store. Yield what exchanges tensors through it, between the devices of the
    job's.
    """
    device, own = tensors[0].tensor.device, client.own_tables
    sizes, rule = trial_sizes(tensors, member.seats.planes)[: len(own)], _rule_of(tensors)
    held = [
        Trained(name=f"trial {number}", tensor=torch.zeros(size, device=device), rule=rule)
        for number, size in enumerate(sizes)
    ]
    gradients = [torch.zeros(size, device=device) for size in sizes]
    of_plane = range(own[0], own[-1] + 1) if own else range(0)
    tables = ServerTables(client, held, of_plane, trial_store(tensors, member), ExchangeSettings())
    tables.open([()] * len(held), None)

    def exchange(together: range) -> None:
        tables.start(Step(0, (0.0,)))
        for number in together[: len(own)]:
            tables.push(number, gradients[number])
        for number in together[: len(own)]:
            tables.read(number)
        device_of(device).synchronize()

    try:
        yield exchange
    finally:
        tables.detach()


@contextlib.contextmanager
def _sums(
    client: Client, tensors: Sequence[Trained], member: Membership
) -> Iterator[Callable[[range], None]]:
    """Connect to the other workers for the measurement. Yield what exchanges tensors."""
    device, rule = tensors[0].tensor.device, _rule_of(tensors)
    sizes = trial_sizes(tensors, member.seats.planes)[: len(client.own_tables)]
    if not sizes:
        yield lambda tables: None
        client.barrier()
        return
    values, gradients = ([torch.zeros(size, device=device) for size in sizes] for _ in range(2))
    histories = [
        [torch.zeros_like(value) for _ in range(history_count(rule.kind))] for value in values
    ]
    peers = Peers(member.of_plane.network)
    # a bucket for each large tensor, so that tensors that are not exchanged together share none
    sums = Sums(
        {table: sizes[table] for table in reversed(range(len(sizes)))},
        peers,
        VirtualWorkers.one_each(peers.size),
        device_of(device),
        bucket_bytes=ELEMENT_BYTES * sizes[-1],
    )

    def exchange(tables: range) -> None:
        for table in tables:
            sums.fill(table, gradients[table])
        for table in tables:
            mean = sums.mean(table, -1).to(device)
            update(rule, mean, histories[table], values[table], rate=0.0, step=0)
        device_of(device).synchronize()

    try:
        offers = _collect(client, {"sums": peers.links.address}, whole=False)
        peers.links.connect(peers.addresses(offers, "sums"))
        sums.memory.lend()
        yield exchange
        client.barrier()  # a worker that leaves at once ends sums that others still wait for
    finally:
        sums.close(0)


def _by_turns(
    client: Client, schemes: Sequence[Callable[[range], None]], sizes: Sequence[int]
) -> list[tuple[float, float]]:
    """Return for each scheme its constant seconds, and those for each byte."""
    times = [{each: [_run_s(partial(scheme, each))] for each in TOGETHER} for scheme in schemes]
    own = {"s": max(one[ALL_LARGE][0] for one in times)}
    runs = min(MOST_RUNS, int(RUNS_S / max(other["s"] for other in _collect(client, own))))
    if runs:  # fast links: the first runs allocated
        times = [{each: [] for each in TOGETHER} for _ in schemes]
    for _ in range(runs):
        for scheme, mine in zip(schemes, times, strict=True):
            for each in TOGETHER:
                mine[each].append(_run_s(partial(scheme, each)))
    bytes_of = [ELEMENT_BYTES * sum(sizes[table] for table in each) for each in TOGETHER]
    # the fastest run: what else the processors do makes some runs three times as slow
    return [_line([min(mine[each]) for each in TOGETHER], bytes_of) for mine in times]


def _line(seconds: Sequence[float], bytes_of: Sequence[int]) -> tuple[float, float]:
    """Return the constant, by the small tensor, and the slope, by the large ones; neither is
    below zero.
    """
    small_s, large_s, all_s = seconds
    small, large, all_large = bytes_of
    slope = max(all_s - large_s, all_s / 10) / (all_large - large)
    return max(0.0, small_s - slope * small), slope


def _product_s_per_flop(client: Client, tensors: Sequence[Trained], member: Membership) -> float:
    """Return the seconds of an operation of products, with the update of the weight; zero
    without factors.
    """
    rows = max((t.factor_rows for t in tensors), default=0) * member.seat.host_count
    if not rows:
        return 0.0
    rows = min(max(rows, LEAST_ROWS), MOST_ROWS)
    device, rule = tensors[0].tensor.device, Rule(momentum=0.9)
    scratch = Scratch(device)
    value, history = torch.zeros(SIDE, SIDE, device=device), torch.zeros(SIDE, SIDE, device=device)
    u, v = (torch.zeros(rows, SIDE, device=device) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            apply_factors(
                rule, u, v, value, [history], rate=0.0, step=0, scale=1.0, scratch=scratch
            )
        device_of(device).synchronize()

    multiply(1)
    client.barrier()
    return _run_s(partial(multiply, PRODUCTS)) / (PRODUCTS * 2 * rows * SIDE**2)


def _run_s(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
