"""Workers and shards together, on threads: the bound, exactness, and what a broken network does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ps_server import (
    Client,
    Consistency,
    LocalProtocolError,
    RemoteProtocolError,
    Rule,
    RuleKind,
    Server,
    Shard,
    SignalKind,
    SpecError,
    StalenessTimeout,
    StoreSpec,
    TableSpec,
    ZmqServerTransport,
)
from ps_server.network import Network
from ps_server.protocol.frames import decode
from ps_server.protocol.messages import Push, Value
from ps_server.protocol.schedule import LinkPriority
from ps_server.protocol.worker_session import Session
from ps_server.transport.base import Frames
from tests.support.cluster import (
    TIMEOUT_S,
    TOKEN,
    Connect,
    memory_store,
    run_workers,
    socket_store,
    zeros,
)
from tests.support.memory_transport import Faults, MemoryClientTransport, MemoryNetwork

STORES = {"memory": memory_store, "sockets": socket_store}


def quadratic(
    connect: Connect, store: StoreSpec, iterations: int, results: dict[int, list[bytes]]
) -> None:
    """Each worker pulls every table towards its own target; records the values it ends with."""

    def body(client: Client, rank: int) -> None:
        random = np.random.default_rng(rank)
        values = [np.zeros(t.size, dtype=np.float32) for t in store.tables]
        targets = [random.standard_normal(t.size).astype(np.float32) for t in store.tables]
        client.start(zeros(store))
        for _ in range(iterations):
            for i, (value, target) in enumerate(zip(values, targets, strict=True)):
                client.read(i, value)
                if store.tables[i].staleness:
                    change = (target - value) * np.float32(0.1 / store.workers)
                    client.push(i, change)
                    value += change
                else:
                    client.push(i, value - target, rate=0.1)
            client.clock()
        for i, value in enumerate(values):
            client.read(i, value, staleness=0)
        client.barrier()
        results[rank] = [value.tobytes() for value in values]

    run_workers(connect, store, body)


def spec(shards: int, *, staleness: int = 0, workers: int = 2, **settings: object) -> StoreSpec:
    rule = Rule(kind=RuleKind.SGD, momentum=0.5)
    tables = tuple(
        TableSpec(name=f"t{i}", size=size, rows=rows, staleness=staleness, rule=rule)
        for i, (size, rows) in enumerate([(100, 7), (1, 0), (33, 3)])
    )
    return StoreSpec(workers=workers, shards=shards, tables=tables, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("consistency", Consistency)
@pytest.mark.parametrize("kind", STORES)
def test_every_way_of_running_gives_the_same_bits(kind: str, consistency: Consistency) -> None:
    found = set()
    for shards in (1, 2, 3):
        results: dict[int, list[bytes]] = {}
        with STORES[kind](3, shards) as connect:
            quadratic(connect, spec(shards, workers=3, consistency=consistency), 8, results)
        assert results[0] == results[1] == results[2]
        found.add(tuple(results[0]))
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(2))
def test_delays_change_no_bit(seed: int) -> None:
    results: dict[int, list[bytes]] = {}
    with memory_store(3, 2, Faults(seed=seed, delay=20)) as connect:
        quadratic(connect, spec(2, workers=3, clip=1.0), 5, results)
    plain: dict[int, list[bytes]] = {}
    with memory_store(3, 2) as connect:
        quadratic(connect, spec(2, workers=3, clip=1.0), 5, plain)
    assert results == plain


@pytest.mark.parametrize("consistency", Consistency)
@pytest.mark.parametrize("staleness", [1, 3])
def test_at_staleness_s_all_end_with_the_same_sum(staleness: int, consistency: Consistency) -> None:
    results: dict[int, list[bytes]] = {}
    with memory_store(3, 2, Faults(seed=staleness, delay=8)) as connect:
        quadratic(
            connect, spec(2, staleness=staleness, workers=3, consistency=consistency), 10, results
        )
    for a, b in zip(results[0], results[1], strict=True):
        np.testing.assert_allclose(
            np.frombuffer(a, "<f4"), np.frombuffer(b, "<f4"), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("consistency", Consistency)
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_no_worker_reads_a_value_older_than_the_bound(
    staleness: int, consistency: Consistency
) -> None:
    """Each worker's pushes count its iterations in its own element; every read is checked
    against the bound.
    """
    workers, iterations = 3, 12
    rule = Rule()
    table = TableSpec(name="counts", size=workers, staleness=staleness, rule=rule)
    store = StoreSpec(workers=workers, shards=1, tables=(table,), consistency=consistency)
    started = [0] * workers
    lead = [0]

    def body(client: Client, rank: int) -> None:
        counts = np.zeros(workers, dtype=np.float32)
        client.start(zeros(store))
        for clock in range(iterations):
            client.read(0, counts)
            started[rank] = clock + 1
            lead[0] = max(lead[0], clock - min(started) + 1)
            assert counts.min() >= clock - staleness, (rank, clock, counts)
            assert counts[rank] == clock  # read my writes
            one = np.zeros(workers, dtype=np.float32)
            one[rank] = 1 if staleness else -workers  # at 0 the shard averages and subtracts
            client.push(0, one, rate=1.0)
            if staleness:
                counts[rank] += 1
            client.clock()

    with memory_store(workers, 1, Faults(seed=staleness, delay=6)) as connect:
        run_workers(connect, store, body)
    assert lead[0] <= staleness + 1


def test_bound_tables_end_with_the_same_bits() -> None:
    plain: dict[int, list[bytes]] = {}
    with memory_store(2, 2) as connect:
        quadratic(connect, spec(2, clip=1.0), 6, plain)
    ends: dict[int, list[bytes]] = {}
    store = spec(2, clip=1.0)

    def body(client: Client, rank: int) -> None:
        random = np.random.default_rng(rank)
        values = [np.zeros(t.size, dtype=np.float32) for t in store.tables]
        targets = [random.standard_normal(t.size).astype(np.float32) for t in store.tables]
        for i, value in enumerate(values):
            client.bind(i, value)
        client.start(zeros(store))
        for _ in range(6):
            gradients = []
            for i, (value, target) in enumerate(zip(values, targets, strict=True)):
                client.read(i, value)
                gradients.append(value - target)
            for i in reversed(range(len(values))):  # the order of a backward pass
                client.push(i, gradients[i], rate=0.1)
            client.clock()
        for i, value in enumerate(values):
            client.read(i, value)
        client.barrier()
        ends[rank] = [value.tobytes() for value in values]

    with socket_store(2, 2) as connect:
        run_workers(connect, store, body)
    assert ends == plain


class Gate:
    """A worker's transport that takes nothing while it is shut, and notes the tables of the
    pushes that it took.
    """

    def __init__(self, transport: MemoryClientTransport) -> None:
        self._transport = transport
        self.shut = False
        self.tables: list[int] = []

    def blocks(self, shard: int) -> bool:
        return False

    def send(self, shard: int, frames: Frames) -> bool:
        if self.shut:
            return False
        self.tables += [message.table for message, _ in decode(frames) if isinstance(message, Push)]
        return self._transport.send(shard, frames)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        return self._transport.receive(0.01 if self.shut else timeout_s)

    def wake(self) -> None:
        self._transport.wake()

    def close(self, *, drops: bool = False) -> None:
        self._transport.close()


@contextmanager
def gated(store: StoreSpec) -> Iterator[tuple[Gate, Client]]:
    """The only worker of a store with one shard, started, behind a gate."""
    network = MemoryNetwork(1)
    server = Server(Shard(0, 1), network.server(0))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    gate = Gate(network.client("worker 0"))
    client = Client(gate, Network(timeout_s=20), store=store)
    client.start(zeros(store))
    yield gate, client
    client.close()
    thread.join()


def test_a_late_urgent_push_overtakes_what_waits() -> None:
    """The last layer's gradient is large and comes first; the first layer's comes last and is
    needed first.
    """
    chunks = 9
    tables = (
        TableSpec(name="first", size=10),
        TableSpec(name="last", size=90_000 * chunks, rows=chunks),
    )
    store = StoreSpec(workers=1, shards=1, tables=tables)
    values = [np.zeros(table.size, dtype=np.float32) for table in tables]
    with gated(store) as (gate, client):
        gate.shut = True
        client.push(1, values[1].copy(), rate=0.1)
        client.push(0, values[0].copy(), rate=0.1)
        gate.shut = False
        client.clock()
        for table in (0, 1):
            client.read(table, values[table])
    assert gate.tables == [0] + [1] * chunks


def test_pushes_wait_for_what_goes_first_and_questions_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.pump.POLL_S", 60.0)  # nobody looks unasked
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="conv", size=10),))
    link = LinkPriority()
    with gated(store) as (gate, client):
        client.yield_link(link)
        link.take()
        client.push(0, np.ones(10, dtype=np.float32), rate=0.1)
        client.clock()
        client.barrier()  # there and back: whatever could leave has left
        assert gate.tables == []
        link.free()
        client.read(0, np.zeros(10, dtype=np.float32))
        assert gate.tables == [0]
        link.take()
        client.push(0, np.ones(10, dtype=np.float32), rate=0.1)
        client.clock()  # closing says all that there is to say
    assert gate.tables == [0, 0]
    monkeypatch.setattr(gate, "wake", None)
    link.free()  # a transport that is closed is left alone


def test_what_was_asked_for_before_a_store_begins_anew_is_asked_for_in_it() -> None:
    """The stop of the store before named an iteration that is past in the new one: nobody stops
    there.
    """
    store = StoreSpec(
        workers=3, shards=2, tables=(TableSpec(name="w", size=6, rows=2, rule=Rule()),)
    )
    stopped: dict[int, int] = {}

    def body(client: Client, rank: int) -> None:
        value = np.zeros(6, dtype=np.float32)
        client.start(zeros(store))
        client.read(0, value)
        if rank == 0:
            client.signal(SignalKind.STOP)
        client.renew(100)
        client.start(lambda table: [np.full(6, 2.0, np.float32)])
        client.read(0, value)
        assert client.iterations == 100
        assert value.tolist() == [2.0] * 6
        while not any(signal.clock <= client.iterations for signal in client.signals):
            client.push(0, np.zeros(6, np.float32), rate=0.1)
            client.clock()
            client.read(0, value)
        stopped[rank] = client.iterations
        with pytest.raises(LocalProtocolError, match="before its first push"):
            client.renew(0)

    with memory_store(3, 2, Faults(delay=3)) as connect:
        run_workers(connect, store, body)
    assert set(stopped.values()) == {103}


@pytest.mark.parametrize("transport", STORES)
def test_another_store_follows_a_trial(transport: str) -> None:
    """Tables of the trial are pushed as often as each worker likes, and none of its values
    reaches the next store.
    """
    large = TableSpec(name="large", size=40_000)
    trial = StoreSpec(
        workers=3, shards=2, trial=True, tables=(TableSpec(name="small", size=5), large)
    )
    store = StoreSpec(
        workers=3, shards=2, tables=(TableSpec(name="w", size=6, rows=2, rule=Rule()),)
    )

    def body(client: Client, rank: int) -> None:
        tried, value = np.zeros(40_000, np.float32), np.zeros(6, np.float32)
        client.start(zeros(trial))
        for _ in range(3):
            client.push(1, np.ones(40_000, np.float32), rate=1.0)
            client.read(1, tried)
        assert (tried == -3).all()
        client.replace_trial(store)
        client.start(lambda table: [np.full(6, 2.0, np.float32)])
        client.read(0, value)
        for _ in range(2):
            client.push(0, np.ones(6, np.float32), rate=1.0)
            client.clock()
            client.read(0, value)
        assert value.tolist() == [0.0] * 6
        assert [table.name for table in client.statistics().tables] == ["w"]
        with pytest.raises(LocalProtocolError, match="only a trial store is replaced"):
            client.replace_trial(store)

    with STORES[transport](3, 2) as connect:
        run_workers(connect, trial, body)


def test_a_trial_is_not_replaced_while_a_value_is_due() -> None:
    trial = StoreSpec(workers=1, shards=1, trial=True, tables=(TableSpec(name="w", size=2),))
    session = Session(0, trial)
    session.start(lambda table: [np.zeros(2, np.float32)])
    session.receive(0, Value(0, 0, 0, 0, np.zeros(2, np.float32)))
    session.push(0, np.ones(2, np.float32), rate=1.0)
    with pytest.raises(LocalProtocolError, match="has been read"):
        session.replaced(trial)


def test_replayed_frames_are_refused_and_said_so() -> None:
    store = spec(1)
    faults = Faults(seed=0, repeat=0.2)
    # The other worker waits in vain for the one that was told.
    with memory_store(2, 1, faults, timeout_s=2.0) as connect, pytest.raises(RemoteProtocolError):
        quadratic(connect, store, 50, {})


def test_a_cut_link_is_noticed() -> None:
    network = MemoryNetwork(1)
    client = Client(network.client("worker 0"), Network(token=TOKEN, timeout_s=0.1), store=spec(1))
    network.cut("worker 0", 0)
    with pytest.raises(StalenessTimeout, match="table 't0' did not become fresh enough"):
        client.start(zeros(spec(1)))
    client.close()


def test_a_store_needs_an_address_for_each_shard() -> None:
    with pytest.raises(SpecError, match="has 2 shards, but 1 addresses were given;"):
        Client(["tcp://127.0.0.1:1"], Network(), spec(2))


def test_who_waits_when_the_client_is_closed_hears_of_it() -> None:
    client = Client(MemoryNetwork(1).client("worker 0"), Network(), store=spec(1, workers=1))
    waiting = threading.Event()
    heard: list[str] = []

    def never() -> None:
        waiting.set()  # under the client's lock, which the waiter gives up only by waiting

    def wait() -> None:
        try:
            client._monitor.wait_for(never, "it did not come")
        except LocalProtocolError as error:
            heard.append(str(error))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert waiting.wait(TIMEOUT_S)
    client.close()
    waiter.join(TIMEOUT_S)
    assert heard == ["the client is closed"]


def test_who_waits_is_not_woken_by_each_message() -> None:
    store = spec(1, workers=1)
    asked_by: list[int] = []

    def body(client: Client, rank: int) -> None:
        client.start(zeros(store))
        came = [client.gather() for _ in range(50)]

        def all_came() -> bool | None:
            asked_by.append(threading.get_ident())
            return all(collection.poll() is not None for collection in came) or None

        client._monitor.wait_for(all_came, "not all came")
        assert asked_by.count(threading.get_ident()) <= 1  # before it waited

    with memory_store(1, 1) as connect:
        run_workers(connect, store, body)


def test_a_worker_that_closes_before_it_has_read_its_values_has_left() -> None:
    """All that it has sent is at the shard, too."""
    size, tables = 1 << 18, 8
    store = StoreSpec(
        workers=1,
        shards=1,
        tables=tuple(TableSpec(name=f"{table}", size=size) for table in range(tables)),
    )
    server = Server(Shard(0, 1, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0"))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        client = Client(
            [server.address],
            Network(token=TOKEN, timeout_s=TIMEOUT_S),
            store=store,
            share_memory=False,
        )
        client.start(zeros(store))
        for table in range(tables):
            client.push(table, np.ones(size, np.float32), rate=0.1)
        client.clock()
        client.close()
        assert server.shard.members.finished
        assert server.shard.counts.updates == len(server.shard.present.cells)
    finally:
        server.stop()
        thread.join()


def test_a_client_that_has_not_joined_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.pump.LINGER_S", 1000.0)
    with memory_store(1, 1) as connect:
        connect(0, StoreSpec(workers=1, shards=1, tables=())).close()


@pytest.mark.parametrize("where", STORES)
@pytest.mark.parametrize("bind", [True, False])
def test_a_mean_is_read_within_its_iteration_and_may_be_skipped(where: str, bind: bool) -> None:
    spec = StoreSpec(
        workers=2,
        shards=2,
        tables=(TableSpec(name="w", size=9, rows=2, rule=Rule(kind=RuleKind.MEAN)),),
    )
    seen: dict[int, list[float]] = {}

    def body(client: Client, rank: int) -> None:
        value = np.zeros(9, dtype=np.float32)
        if bind:
            client.bind(0, value)
        client.start(zeros(spec))
        client.read(0, value)
        for iteration in range(4):
            if iteration % 2:
                client.skip(0)
            else:
                client.push(0, np.full(9, 10 * iteration + rank, dtype=np.float32))
            client.read(0, value, staleness=-1)
            seen.setdefault(rank, []).append(float(value[0]))
            assert (value == value[0]).all()
            client.clock()
            client.read(0, value)
        client.barrier()

    with STORES[where](2, 2) as connect:
        run_workers(connect, spec, body)
    assert seen == {0: [0.5, 0.5, 20.5, 20.5], 1: [0.5, 0.5, 20.5, 20.5]}
