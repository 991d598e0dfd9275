"""The contract of every exchange on devices that run work late: no access without an event
between, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.base import Array, ExchangeSettings, Trained
from poseidon.exchange.device import DONE, HOST, Event
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.factors import products
from poseidon.exchange.factors.products import Kernel, Scratch
from poseidon.exchange.factors.rebuilding import Rebuilding
from poseidon.exchange.factors.weight import FactorWeight
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind
from poseidon.exchange.ruled import RuledTensor
from poseidon.exchange.server import tables
from poseidon.exchange.server.table import ServerTable
from poseidon.torch.module_watch import SentGradients
from ps_server import Precision, Rule
from tests.poseidon.exchange.test_carrier import ADAM, EXCHANGES
from tests.poseidon.exchange.test_exchange_contract import server
from tests.poseidon.exchange.test_server_exchange import hybrid
from tests.support.exchange_contract import (
    Make,
    Net,
    Scenario,
    check_calls,
    check_exact,
    check_reopen,
    train,
)
from tests.support.machines import machines
from tests.support.simulated_device import (
    TYPE,
    Race,
    SimulatedDevice,
    SimulatedEvent,
    simulated_devices,
)
from tests.support.threads import on_threads

LATEST = 5
"""The seed of a device on which work runs only where something waits for it."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 10))]
ALL = {
    **EXCHANGES,
    "one host of four": (lambda: machines(ExchangeKind.SERVER, (4,), shards=0), 4, ADAM),
    "hosts of four and two": (lambda: machines(ExchangeKind.HYBRID, (4, 2)), 6, ADAM),
}


def device_of(rank: int) -> torch.device:
    return torch.device("lazy", rank)


SAMPLE = ("alone", "server, factors and all-reduce", "two hosts through the server")
LARGER = (*SAMPLE, "pools", "two hosts by factors", "two unequal hosts by all-reduce")
LARGER += ("rounds on two hosts", "one host of four")


def some(names: Sequence[str]) -> Any:
    """Leave all others to --thorough."""
    return pytest.mark.parametrize(
        ("opened", "workers", "scenario"),
        [
            pytest.param(*case, id=name, marks=() if name in names else pytest.mark.thorough)
            for name, case in ALL.items()
        ],
    )


@pytest.mark.parametrize("seed", SEEDS)
class TestContract:
    """The scenarios of the contract."""

    @some(LARGER)
    def test_it_is_exact(
        self,
        opened: Callable[[], AbstractContextManager[Make]],
        workers: int,
        scenario: Scenario,
        seed: int,
    ) -> None:
        with simulated_devices(workers, seed), opened() as make:
            check_exact(make, workers, scenario, device_of)

    @some(SAMPLE)
    def test_it_is_opened_once_more(
        self,
        opened: Callable[[], AbstractContextManager[Make]],
        workers: int,
        scenario: Scenario,
        seed: int,
    ) -> None:
        with simulated_devices(workers, seed):
            check_reopen(opened, workers, scenario, device_of)

    @some(SAMPLE)
    def test_its_calls(
        self,
        opened: Callable[[], AbstractContextManager[Make]],
        workers: int,
        scenario: Scenario,
        seed: int,
    ) -> None:
        with simulated_devices(workers, seed), opened() as make:
            check_calls(make, workers, device_of)


LOSSY: dict[str, dict[str, Any]] = {
    "int8": {"compress": "*=int8"},
    "sign/int8": {"compress": "*=sign/int8"},
    "topk": {"compress": "*=topk:0.3"},
    "randomk": {"compress": "*=randomk:0.3"},
    "float16": {"precision": Precision.FLOAT16},
    "bfloat16": {"precision": Precision.BFLOAT16},
    "powersgd": {"compress": "*.weight=powersgd:1,*=int8"},
}


def a_few(names: Iterable[str], *always: str) -> list[Any]:
    """Leave all others to --thorough."""
    return [
        pytest.param(name, marks=() if name in always else pytest.mark.thorough) for name in names
    ]


STALE = {"server": lambda: server(2, 2, staleness=2), "factors": lambda: hybrid(2, 2, staleness=2)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "clip"), [("server", None), ("factors", 0.2)])
def test_at_staleness_s_all_replicas_settle_on_one_value(
    name: str, clip: float | None, seed: int
) -> None:
    with simulated_devices(2, seed), STALE[name]() as make:
        first, second = train(make, 2, Scenario(clip=clip), device_of=device_of)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of one stream that another uses is freed at once (`FactorStack` when it grew, an
    owner's parts)."""
    monkeypatch.setattr(SimulatedDevice, "keep", lambda self, tensor: None)


def replay_on_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of factors are applied on one stream, and this worker's own pairs on another."""
    publish = Rebuilding.publish

    def changed(self: Rebuilding, weight: FactorWeight) -> None:
        own, device = self.streams, self.streams.device
        self.streams = own._replace(into=device.current)  # type: ignore[attr-defined]
        try:
            publish(self, weight)
        finally:
            self.streams = own

    monkeypatch.setattr(Rebuilding, "publish", changed)


def take_the_norm_on_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of factors is taken on a stream that does not wait for them."""
    limit = Rebuilding._limit

    def elsewhere(self: Rebuilding, rounds: Any) -> float:
        device = self.streams.device
        with device.on(device._first):  # type: ignore[attr-defined]
            return limit(self, rounds)

    monkeypatch.setattr(Rebuilding, "_limit", elsewhere)


def push_zeros_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards may answer zeros before the last value has left the memory for the next one."""
    to_host = ServerTable.to_host

    def at_once(
        self: ServerTable, gradient: Tensor, number: int, clock: int
    ) -> tuple[Tensor, Event]:
        flat, copied = to_host(self, gradient, number, clock)
        return flat, DONE if gradient.device.type == "cpu" else copied

    monkeypatch.setattr(ServerTable, "to_host", at_once)


def send_before_the_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is sent before it is on the host."""
    monkeypatch.setattr(SimulatedEvent, "synchronize", lambda self: None)


def write_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is written to a tensor that the compute stream may still use."""
    copy = SimulatedDevice.copy

    def changed(
        self: SimulatedDevice, source: Tensor, to: Tensor, stream: Any, after: Event
    ) -> Event:
        return copy(self, source, to, stream, DONE if to.device.type == TYPE else after)

    monkeypatch.setattr(SimulatedDevice, "copy", changed)


def publish_before_the_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a host read a value before its owner has copied it to their memory."""
    publish = HostMemory.publish

    def at_once(self: HostMemory, numbers: Sequence[int]) -> None:
        own, self.device = self.device, HOST
        try:
            publish(self, numbers)
        finally:
            self.device = own

    monkeypatch.setattr(HostMemory, "publish", at_once)


MOMENTUM = Scenario(iterations=3)
CLIPPED = Scenario(iterations=3, clip=0.2)
RACES: dict[
    Callable[[pytest.MonkeyPatch], None],
    tuple[Callable[[], AbstractContextManager[Make]], int, Scenario],
] = {
    keep_nothing: (lambda: machines(ExchangeKind.FACTORS, (2, 2)), 4, MOMENTUM),
    replay_on_the_compute_stream: (lambda: hybrid(2, 2, staleness=2), 2, MOMENTUM),
    take_the_norm_on_the_compute_stream: (lambda: hybrid(2, 2), 2, CLIPPED),
    push_zeros_at_once: (lambda: server(2, 2), 2, MOMENTUM),
    send_before_the_copy_ends: (lambda: server(2, 2), 2, MOMENTUM),
    write_values_at_once: (lambda: server(2, 2), 2, MOMENTUM),
    publish_before_the_copy_ends: (
        lambda: machines(ExchangeKind.SERVER, (2,), shards=0),
        2,
        MOMENTUM,
    ),
}


@pytest.mark.parametrize("put_back", RACES, ids=lambda put_back: put_back.__name__)
def test_a_race_is_found(
    put_back: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these was there, or is what an event prevents."""
    opened, workers, scenario = RACES[put_back]
    put_back(monkeypatch)
    for seed in range(20):
        try:
            with simulated_devices(workers, seed), opened() as make:
                train(make, workers, scenario, device_of=device_of)
        except Race:
            return
    pytest.fail("no seed has found it")


def stack_in_one_buffer(scratch: Scratch, name: str, part: Array) -> Tensor:
    return scratch.stack(name, [part], part.shape[1])


@pytest.mark.parametrize("in_one_buffer", [False, True])
def test_each_pair_is_replayed_from_its_own_memory(
    in_one_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one buffer the second pair would replace the first before its copy has run."""
    if in_one_buffer:
        monkeypatch.setattr(Scratch, "own", stack_in_one_buffer)
    expectation = pytest.raises(Race, match="the host wrote") if in_one_buffer else nullcontext()
    with expectation, simulated_devices(1, LATEST) as (device,):
        weight = FactorWeight(
            0,
            RuledTensor(
                Trained(name="fc", tensor=torch.ones(2, 3, device=device.torch), rule=Rule())
            ),
            clock=0,
            staleness=2,
            scratch=Scratch(device.torch, Kernel.PORTABLE),
        )
        weight.open()
        own = []
        for iteration in range(3):
            u, v = (torch.full((4, n), float(iteration), device=device.torch) for n in (2, 3))
            pair, copied = weight.copy(iteration, u, v, device.stream(), device.event())
            copied.synchronize()
            own.append((iteration, 0.5, pair))
        weight.replay(own, scale=0.25)
        assert torch.equal(weight.tensor.cpu(), torch.full((2, 3), 1.0 - 0.5 * (1 + 4)))


def test_waits_and_copies_are_counted() -> None:
    with simulated_devices(1, 0) as (device,):
        stream, pinned = device.stream(), device.host_memory(4)
        values = torch.ones(4, device=device.torch)
        values.add_(1.0)
        copied = device.copy(values, pinned, stream, device.event())
        assert not device.waits
        copied.synchronize()
        assert pinned.tolist() == [2.0] * 4
        assert bool(torch.equal(values, values))
        assert device.waits == {"Event.synchronize": 1, "equal": 1}
        assert (device.copies, device.bytes) == ({"out": 1}, {"out": 16})


def test_training_on_a_host_of_two_devices_waits_for_none() -> None:
    def run(rank: int) -> None:
        device = devices[rank]
        own = [
            Trained(name=f"w{i}", tensor=torch.zeros(3 + i, device=device.torch)) for i in range(4)
        ]
        exchange = make(rank, own, ExchangeSettings())
        try:
            exchange.open(None)
            device.waits.clear()
            for iteration in range(3):
                exchange.start(iteration, 0.1)
                for index in (3, 1, 0):  # the gradient of one is zero
                    exchange.wait(index)
                    exchange.begin(index, torch.ones_like(own[index].tensor))
                exchange.finish()
            assert not device.waits
            exchange.settle()
            assert [float(trained.tensor[0]) for trained in own] == pytest.approx(
                [-0.3, -0.3, 0, -0.3]
            )
        finally:
            exchange.close()

    with simulated_devices(2, 0) as devices, machines(ExchangeKind.SERVER, (2,), shards=0) as make:
        on_threads(2, run)


def test_owners_on_a_host_begin_with_the_values_of_worker_0() -> None:
    """Statistics are of a different worker's plane than the weights."""

    def run(rank: int) -> None:
        own = [
            Trained(name=name, tensor=torch.full((4,), rank + 1.0, device=device_of(rank)), **how)
            for name, how in (("w", {}), ("mean", {"statistics": True}))
        ]
        exchange = make(rank, own, ExchangeSettings())
        try:
            exchange.open(None)
            assert [trained.tensor.cpu().tolist() for trained in own] == [[1.0] * 4] * 2
        finally:
            exchange.close()

    with simulated_devices(2, LATEST), machines(ExchangeKind.SERVER, (2,), shards=1) as make:
        on_threads(2, run)


def test_without_an_event_two_streams_race() -> None:
    expected = pytest.raises(Race, match="writes on stream 1 what add_ writes on stream 0")
    with expected, simulated_devices(1, 0) as (device,):
        values = torch.ones(4, device=device.torch)
        values.add_(1.0)
        with device.on(device.stream()):
            values.zero_()


def test_new_memory_may_still_be_in_use_on_the_stream_that_took_it() -> None:
    """As of torch's allocator, which gives a stream what it has freed before its work has run."""
    expected = pytest.raises(Race, match="what the work before the memory was taken")
    with expected, simulated_devices(1, 0) as (device,):
        torch.ones(4, device=device.torch).add_(1.0)
        memory = torch.empty(4, device=device.torch)
        with device.on(device.stream()):
            memory.zero_()


def steps_of(make: Make, device: SimulatedDevice, scenario: Scenario) -> list[dict[str, int]]:
    """Return how often the training loop has waited for the device in each step."""
    net = Net().to(device.torch)
    rules = [Trained(name=n, tensor=p, rule=scenario.rule) for n, p in net.named_parameters()]
    exchange = make(0, rules, ExchangeSettings(clip=scenario.clip))
    hooks = Hooks([net], rules, exchange)
    x, y = torch.randn(4, 5).to(device.torch), torch.randn(4, 2).to(device.torch)
    found = []
    exchange.open(None)
    for iteration in range(scenario.iterations):
        device.waits.clear()
        exchange.start(iteration, 0.1)
        hooks.start()
        torch.nn.functional.mse_loss(net(x), y).backward()
        hooks.next_pass()
        hooks.finish()
        exchange.finish()
        found.append(dict(device.waits))
    exchange.settle()
    hooks.close()
    exchange.close()
    return found


@pytest.mark.parametrize("clip", [None, 0.2])
def test_one_worker_alone_never_waits_for_its_device(clip: float | None) -> None:
    with simulated_devices(1, LATEST) as (device,), EXCHANGES["alone"][0]() as make:
        assert steps_of(make, device, replace(ADAM, clip=clip)) == [{}] * ADAM.iterations


@pytest.mark.parametrize("how", ["float32", "int8", "topk", "randomk", "bfloat16", "powersgd"])
def test_a_training_loop_through_a_shard_never_waits_for_its_device(how: str) -> None:
    """A background thread waits for copies. The first values may still be on their way."""
    shard = machines(ExchangeKind.SERVER, (1,), shards=1, **LOSSY.get(how, {}))
    with simulated_devices(1, LATEST) as (device,), shard as make:
        _, *steps = steps_of(make, device, Scenario())
        assert steps == [{}] * (Scenario().iterations - 1)


def test_factors_of_many_rows_are_replayed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host rows that are zero are left out, which a device would have to be asked for."""

    def run(rank: int) -> None:
        device = devices[rank]
        weight = torch.zeros(2, 3, device=device.torch)
        exchange = make(rank, [Trained(name="fc", tensor=weight)], ExchangeSettings())
        try:
            exchange.open(None)
            for iteration in range(4):
                device.waits.clear()
                exchange.start(iteration, 0.25)
                exchange.wait(0)
                u, v = (torch.zeros(5, n, device=device.torch) for n in (2, 3))
                u[rank], v[rank] = 1.0, 1.0
                exchange.begin_factors(0, u, v)
                exchange.release(0)
                exchange.finish()
                assert not iteration or not device.waits
            exchange.settle()
            assert torch.equal(weight.cpu(), torch.full((2, 3), -1.0))
        finally:
            exchange.close()

    monkeypatch.setattr(products, "BLOCK_ROWS", 2)
    factors = hybrid(2, 1, staleness=2, by_factors=[0])
    with simulated_devices(2, LATEST) as devices, factors as make:
        on_threads(2, run)


@pytest.mark.parametrize(
    "hosts", [(2, 2), pytest.param((1, 1), marks=pytest.mark.thorough)], ids=["two", "one"]
)
@pytest.mark.parametrize("how", a_few(LOSSY, "int8", "powersgd"))
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_device_encodes_has_the_bits_of_the_host(
    how: str, hosts: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for by_host in (False, True):
        if by_host:
            monkeypatch.setattr(tables, "device_encoders", lambda *_: [])
        with (
            simulated_devices(sum(hosts), seed),
            machines(ExchangeKind.SERVER, hosts, **LOSSY[how]) as make,
        ):
            ends.append(train(make, sum(hosts), Scenario(passes=2), device_of=device_of))
    for on_device, on_host in zip(*ends, strict=True):
        for a, b in zip(on_device, on_host, strict=True):
            np.testing.assert_array_equal(a, b)


def test_encoded_pushes_are_smaller_copies_and_wait_for_nothing() -> None:
    found = {}
    for how in ("none", "int8", "topk", "randomk", "float16"):
        options = LOSSY.get(how, {})
        with (
            simulated_devices(1, LATEST) as (device,),
            machines(ExchangeKind.SERVER, (1,), shards=1, **options) as make,
        ):
            wide = [Trained(name="w", tensor=torch.zeros(64, 512, device=device.torch))]
            exchange = make(0, wide, ExchangeSettings())
            exchange.open(None)
            exchange.start(0, 0.1)
            exchange.wait(0)
            for counter in (device.waits, device.copies, device.bytes):
                counter.clear()
            exchange.begin(0, torch.ones_like(wide[0].tensor))
            exchange.finish()
            assert not device.waits
            exchange.settle()
            found[how] = device.copies["out"], device.bytes["out"]
            exchange.close()
    size = 64 * 512
    assert found == {
        "none": (1, 4 * size),
        "int8": (1, size + 4 * size // 256),
        "topk": (1, 2 * 6 * round(0.3 * size / 2)),
        "randomk": (1, 2 * 4 * round(0.3 * size / 2)),
        "float16": (1, 2 * size),
    }


def test_what_a_device_holds_back_is_a_part_of_the_state() -> None:
    def opened(make: Make, held_back: Mapping[str, Array]) -> tuple[Exchange, Tensor]:
        weight = torch.zeros(30, 40, device=device.torch)
        exchange = make(0, [Trained(name="w", tensor=weight)], ExchangeSettings())
        exchange.state.hold_back(held_back)
        exchange.open(None)
        return exchange, weight

    def job() -> AbstractContextManager[Make]:
        return machines(ExchangeKind.SERVER, (1,), shards=1, compress="*=int8")

    with simulated_devices(1, LATEST) as (device,):
        with job() as make:
            exchange, weight = opened(make, {})
            for iteration in range(2):
                exchange.start(iteration, 0.1)
                exchange.wait(0)
                exchange.begin(0, torch.linspace(-1, 2, 1200).view(30, 40).to(device.torch))
                exchange.finish()
            exchange.settle()
            lost = exchange.state.held_back()
            exchange.close()
        assert np.abs(lost["w, pushes of 0"]).max() > 0
        with job() as make:
            exchange, weight = opened(make, lost)
            part = exchange.state.parts()["w, pushes of 0"]
            assert part.device == weight.device
            np.testing.assert_array_equal(part.cpu().numpy(), lost["w, pushes of 0"])
            exchange.close()


def test_a_changed_gradient_is_refused_without_a_wait() -> None:
    with simulated_devices(1, 3) as (device,):
        parameter = torch.nn.Parameter(torch.ones(3, device=device.torch))
        sent = SentGradients(Membership(), "the gradients have changed")
        (parameter * 2).sum().backward()
        sent.note([parameter])
        assert parameter.grad is not None
        with torch._C._AutoDispatchBelowAutograd():  # as GradScaler, without a new version
            parameter.grad.mul_(0.5)
        device.waits.clear()
        sent.check()
        assert not device.waits
        device.synchronize()
        with pytest.raises(UsageError, match="have changed"):
            sent.check()
