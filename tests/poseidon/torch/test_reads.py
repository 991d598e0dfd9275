"""What the script reads after a step is the value after that step, whoever reads it and how."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions, RunsOn
from poseidon.torch.reads import OnItsWay, Reads
from poseidon.torch.update_rules import SGD
from ps_server import Consistency, PeerLost
from tests.support.module_groups import BATCH, How, batches, member, together
from tests.support.module_groups import build as build_net
from tests.support.thread_streams import streams_of_threads

KINDS = [ExchangeKind.SERVER, ExchangeKind.FACTORS, ExchangeKind.HYBRID, ExchangeKind.ALLREDUCE]


class Normed(nn.Module):
    """A net with attention, a tied weight and running statistics."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = build_net(rank)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x_NCT: Tensor) -> Tensor:
        result: Tensor = self.norm(self.net(x_NCT))
        return result


def again(module: nn.Module) -> list[Tensor]:
    """A copy through a file."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return [*loaded.parameters(), *loaded.buffers()]


def averaged(module: nn.Module) -> list[Tensor]:
    average = AveragedModel(module, avg_fn=lambda _, new, count: new)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    average.update_parameters(module)
    average.update_parameters(module)
    return list(average.parameters())


def lerped(module: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p, requires_grad=False) for p in module.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(found, list(module.parameters()), 0.5)
    return found


def in_another_module(module: nn.Module) -> list[Tensor]:
    assert isinstance(module, Normed)
    other = nn.Linear(10, 4, bias=False)
    other.weight = module.net.last.weight
    return [other(torch.ones(1, 10))]


def functional(module: nn.Module) -> list[Tensor]:
    assert isinstance(module, Normed)
    values = dict[str, Tensor](module.net.last.named_parameters())
    return [torch.func.functional_call(nn.Linear(10, 4), values, torch.ones(1, 10))]


def gradient_by_itself(module: nn.Module) -> list[Tensor]:
    scale = module.get_parameter("net.scale")
    return list(torch.autograd.grad(scale.square().sum(), scale))


def evaluated(module: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        found = module.eval()(torch.ones(2, 3, 5))
    module.train()
    return [found]


READERS: dict[str, Callable[[nn.Module], object]] = {
    "detach": lambda net: [p.detach() for p in net.parameters()],
    "data": lambda net: [p.data for p in net.parameters()],
    "numpy": lambda net: [p.detach().cpu().numpy() for p in net.parameters()],
    "tolist": lambda net: [p.tolist() for _, p in net.named_parameters()],
    "item": lambda net: net.get_parameter("net.last.bias")[1].item(),
    "repr": lambda net: repr(list(net.parameters())),
    "format": lambda net: f"{net.get_parameter('net.last.bias')}",
    "iteration": lambda net: list(net.get_parameter("net.last.bias")),
    "a norm": lambda net: torch.nn.utils.get_total_norm(list(net.parameters())),
    "foreach": lambda net: torch._foreach_norm(list(net.parameters())),
    "an operator of aten": lambda net: torch.ops.aten.norm(net.get_parameter("net.scale")),
    "a comparison": lambda net: net.get_parameter("net.scale") > 0.9,
    "buffers": lambda net: list(net.buffers()),
    "a buffer as an array": lambda net: np.asarray(net.get_buffer("norm.running_mean")),
    "state_dict": lambda net: net.state_dict(),
    "deepcopy": lambda net: list(copy.deepcopy(net).parameters()),
    "deepcopy of a layer": lambda net: list(copy.deepcopy(net.get_submodule("norm")).buffers()),
    "copy of a parameter": lambda net: copy.copy(net.get_parameter("net.scale")),
    "torch.save": again,
    "pickle": lambda net: pickle.loads(pickle.dumps(list(net.parameters()))),
    "parameters_to_vector": lambda net: parameters_to_vector(net.parameters()),
    "a new parameter": lambda net: [nn.Parameter(p) for p in net.parameters()],
    "an average": averaged,
    "lerp": lerped,
    "another module": in_another_module,
    "functional_call": functional,
    "vmap": lambda net: torch.func.vmap(lambda row: row * 2)(net.get_parameter("net.last.weight")),
    "autograd.grad": gradient_by_itself,
    "DLPack": lambda net: torch.utils.dlpack.from_dlpack(
        net.get_parameter("net.last.bias").detach()
    ),
    "memory": lambda net: net.get_parameter("net.last.bias").untyped_storage().tolist(),
    "an evaluation": evaluated,
}


def kept(value: object) -> object:
    """A copy that no later step changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items()}
    return [kept(part) for part in value] if isinstance(value, list | tuple) else copy.copy(value)


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, dict):
        return all(same(value, other[key]) for key, value in one.items())  # type: ignore[index]
    if isinstance(one, list):
        return isinstance(other, list) and all(map(same, one, other))
    return one == other


class Loop:
    """A loop in which one worker reads before any other has sent its last gradients."""

    def __init__(self, steps: int) -> None:
        self._begins = [threading.Event() for _ in range(steps)]

    def steps(self, module: nn.Module, group: Group) -> Iterator[tuple[int, bool]]:
        """Yield after each step its number, and whether this worker reads."""
        ((x, y),) = batches()[0]
        own = slice(group.rank, None, group.size)
        for number, begin in enumerate(self._begins):
            reads = number % group.size == group.rank
            loss = nn.functional.mse_loss(module(x[own]), y[own])
            assert reads or begin.wait(60)
            loss.backward()
            if reads:
                begin.set()
            group.step()
            yield number, reads


@pytest.mark.parametrize(("kind", "workers"), list(zip(KINDS, (3, 2, 3, 3), strict=True)))
def test_each_reader_sees_the_step_on_one_worker_alone(kind: ExchangeKind, workers: int) -> None:
    loop = Loop(len(READERS))
    done: list[str] = []

    def body(module: nn.Module, group: Group) -> None:
        names = list(READERS)
        for number, reads in loop.steps(module, group):
            value = kept(READERS[names[number]](module)) if reads else None
            group.settle()
            if reads:
                assert same(value, kept(READERS[names[number]](module))), names[number]
                done.append(names[number])
            assert all(type(p) is nn.Parameter for p in module.parameters())
            assert all(type(b) is Tensor for b in module.buffers())

    options = DistributeOptions(example=torch.ones(BATCH // workers, 3, 5))
    together(workers, Normed, SGD(lr=0.5), body, options=options, member=member(kind))
    assert sorted(done) == sorted(READERS)


def test_an_alias_from_before_the_step_has_the_value_after_it() -> None:
    loop = Loop(12)

    def body(module: nn.Module, group: Group) -> None:
        aliases: list[Callable[[], list[float]]] = []
        for number, _ in loop.steps(module, group):
            seen = [alias() for alias in aliases]
            group.settle()
            weight = module.get_parameter("net.last.weight")
            assert seen == [weight.tolist()] * len(seen)
            view, array = weight.detach(), weight.detach().numpy()
            state = module.state_dict()
            aliases = [view.tolist, array.tolist, state["net.last.weight"].tolist]
            aliases = aliases[number % 4 :]  # in turn fewer, and none
            del view, array, state

    together(2, Normed, SGD(lr=0.5), body, member=member(ExchangeKind.SERVER))


def test_a_loop_that_reads_nothing_has_all_its_waits_in_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    monkeypatch.setattr(Reads, "read", lambda reads, tensor: read.append("read"))

    def body(module: nn.Module, group: Group) -> None:
        for _ in range(4):
            loss = module(torch.ones(4, 3, 5)).square().mean()
            loss.backward()
            group.step()
            module.zero_grad()
            assert all(p.grad is None for p in module.parameters() if p.requires_grad)
            assert [p.shape for p in module.parameters()]
            assert all(isinstance(p, nn.Parameter) for p in module.parameters())

    # with factors the thread that rebuilds a weight may have a view of it when the step ends
    for kind in (ExchangeKind.SERVER, ExchangeKind.ALLREDUCE):
        together(2, Normed, SGD(lr=0.5), body, member=member(kind))
    assert not read


def test_another_thread_sees_the_step() -> None:
    loop = Loop(6)

    def body(module: nn.Module, group: Group) -> None:
        for _, reads in loop.steps(module, group):
            seen: list[list[float]] = []
            weight = module.get_parameter("net.last.weight")
            logger = threading.Thread(target=lambda w=weight, s=seen: s.append(w.tolist()))
            if reads:
                logger.start()
                logger.join()
            group.settle()
            assert seen == [weight.tolist()] * reads

    together(2, Normed, SGD(lr=0.5), body, member=member(ExchangeKind.SERVER))


@pytest.mark.parametrize("read", [torch.norm, lambda p: p.data, copy.deepcopy])
def test_a_read_between_backward_and_step_is_refused(read: Callable[[Tensor], object]) -> None:
    def body(module: nn.Module, group: Group) -> None:
        module(torch.ones(4, 3, 5)).square().mean().backward()
        weight = module.get_parameter("net.last.weight")
        assert weight.grad is not None
        assert module.get_buffer("norm.running_mean").sum() != 0
        with pytest.raises(UsageError, match=r"read or written after 1 backward pass\(es\)"):
            read(weight)
        group.step()
        read(weight)

    together(1, Normed, SGD(lr=0.5), body)


def test_a_hook_that_reads_what_has_left_is_refused_and_may_run_before() -> None:
    norms: list[tuple[float, float]] = []

    def body(module: nn.Module, group: Group) -> None:
        bias = module.get_parameter("net.last.bias")
        norm = bias.detach().norm().item()
        module(torch.ones(4, 3, 5)).square().mean().backward()
        group.step()
        norms.append((norm, read[-1]))
        bias.register_post_accumulate_grad_hook(note)
        with pytest.raises(UsageError, match=r"'net.last.bias' is read or written in a hook"):
            module(torch.ones(4, 3, 5)).square().mean().backward()
        raise StopIteration

    def note(parameter: Tensor) -> None:
        read.append(parameter.detach().norm().item())

    def build(rank: int) -> nn.Module:
        module = Normed(rank)
        module.get_parameter("net.last.bias").register_post_accumulate_grad_hook(note)
        return module

    read: list[float] = []
    with pytest.raises(StopIteration):
        together(1, build, SGD(lr=0.5), body)
    ((before, within),) = norms
    assert before == within


class Watched(torch.autograd.Function):
    """Runs a function within the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, act: Callable[[], object]) -> Tensor:
        context.act = act
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        context.act()
        return gradient, None


@pytest.mark.parametrize("used", ["by its layer", "detached, too", "by the script"])
def test_a_gradient_waits_for_the_step_where_a_node_still_reads_the_weight(used: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if used == "detached, too":
                x = nn.functional.linear(x, self.last.weight.detach())
            result: Tensor = self.last(Watched.apply(x, act))
            return result

    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, Net)
        view = module.last.weight.detach() if used == "by the script" else None
        index = [trained.name for trained in group._loop.update.plan.tensors].index("last.weight")
        acts.append(lambda: left.append(group._loop.exchanged.hooks.has_left(index)))
        for _ in range(2):
            module(torch.ones(4, 3)).square().mean().backward()
            assert view is None or torch.equal(view, before[-1])
            group.step()
            before.append(module.last.weight.detach().clone())

    def act() -> None:
        acts[0]()

    left: list[bool] = []
    before: list[Tensor] = []
    acts: list[Callable[[], None]] = []
    net = Net()
    before.append(net.last.weight.detach().clone())
    together(1, lambda _: net, SGD(lr=0.5), body)
    assert left == [used == "by its layer"] * 2


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_read_changes_neither_rate_nor_calls_that_are_allowed_next(staleness: int) -> None:
    ends = []
    for reads in (False, True):

        def body(module: nn.Module, group: Group, reads: bool = reads) -> None:
            for number in range(3):
                module(torch.ones(4, 3, 5)).square().mean().backward()
                group.step()
                if reads and group.rank == 0:
                    before = kept(list(module.parameters()))
                    evaluated(module)
                    assert same(before, kept(list(module.parameters())))
                group.lr = 0.5 / (2 + number)  # type: ignore[attr-defined]
                group.settle()

        how = member(ExchangeKind.SERVER, staleness)
        ends.append(together(2, Normed, SGD(lr=0.5), body, member=how))
    if not staleness:
        assert same(ends[0][1], ends[1][1])


def bfloat16(rank: int) -> nn.Module:
    return Normed(rank).to(torch.bfloat16)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


class Reading(NamedTuple):
    """A job whose workers read between a step and their next forward pass."""

    how: How = SGD(lr=0.5, momentum=0.9)
    build: Callable[[int], nn.Module] = Normed
    kind: ExchangeKind = ExchangeKind.HYBRID
    options: ExchangeOptions = ExchangeOptions()
    arguments: DistributeOptions = DistributeOptions()


READINGS = {
    "rounded by the shards": Reading(build=bfloat16),
    "rounded by workers": Reading(build=bfloat16, kind=ExchangeKind.ALLREDUCE),
    "rounded, stale": Reading(build=bfloat16, options=ExchangeOptions(staleness=2)),
    "stale": Reading(options=ExchangeOptions(staleness=2)),
    "stale, another consistency": Reading(
        options=ExchangeOptions(staleness=1, consistency=Consistency.SSP)
    ),
    "local steps of a rule": Reading(options=ExchangeOptions(local_steps=3)),
    "local steps, stale": Reading(options=ExchangeOptions(local_steps=2, staleness=2)),
    "local steps, streamed": Reading(
        options=ExchangeOptions(local_steps=4, sync_fragments=2, sync_delay=1)
    ),
    "local steps of an optimizer": Reading(how=adamw, options=ExchangeOptions(local_steps=3)),
    "an optimizer on the shards": Reading(how=adamw, arguments=DistributeOptions(on=RunsOn.SHARDS)),
    "an optimizer on the workers": Reading(how=adamw),
    "virtual workers": Reading(arguments=DistributeOptions(virtual_workers=5)),
    "virtual workers with values of their own": Reading(
        options=ExchangeOptions(local_steps=3), arguments=DistributeOptions(virtual_workers=5)
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_read_gives_what_the_next_forward_pass_uses(name: str) -> None:
    """Each worker reads on its own: after some steps all tensors, after others one, or none."""
    job = READINGS[name]

    def body(module: nn.Module, group: Group) -> None:
        read: dict[str, Tensor] = {}
        plain = plains[group.rank]
        number = 0
        while group.steps < 12:
            number += 1
            x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(number))
            x = x.to(module.get_parameter("net.scale").dtype)
            output = module(x)
            if len(read) > 1:
                plain.load_state_dict(read)
                assert torch.equal(plain(x), output), (name, number)
            for key, value in read.items():
                if "running" not in key and "tracked" not in key:
                    assert torch.equal(module.state_dict()[key], value), (name, number, key)
            output.square().mean().backward()
            group.step()
            read = {}
            if (number + group.rank) % 3 == 0:
                read = {key: value.clone() for key, value in module.state_dict().items()}
            elif (number + group.rank) % 3 == 1:
                read = {"net.last.bias": module.get_parameter("net.last.bias").detach().clone()}

    plains = [job.build(0) for _ in range(2)]
    how = member(job.kind)
    how = replace(how, options=replace(job.options, kind=job.kind))
    with streams_of_threads():
        together(2, job.build, job.how, body, options=job.arguments, member=how)


class Brought:
    """Reads of one layer, whose values come when they are read."""

    def __init__(self, layer: nn.Linear | None = None) -> None:
        self.layer = layer or nn.Linear(3, 2)
        sources: list[Tensor] = [self.layer.weight, self.layer.bias]
        self.indices: list[int] = []
        self.error: Exception | None = None
        self.reads = Reads(self.layer, dict(enumerate(sources)), self._bring)
        self.reads.aliases.note_own()

    def _bring(self, index: int) -> None:
        self.indices.append(index)
        if self.error is not None:
            raise self.error
        self.reads.came(index)


def test_a_tensor_has_its_class_again_once_it_is_read() -> None:
    brought = Brought()
    weight, bias = brought.layer.weight, brought.layer.bias
    brought.reads.leave()
    assert OnItsWay in type(weight).__mro__
    assert isinstance(weight, nn.Parameter)
    assert "Parameter containing" in repr(weight)
    assert type(weight) is nn.Parameter
    assert type(copy.deepcopy(bias)) is type(bias) is nn.Parameter
    assert brought.indices == [0, 1]


def test_transforms_of_torch_func_are_readers() -> None:
    brought = Brought()
    for index, wrap in enumerate(("_wrap_for_grad", "_wrap_functional_tensor")):
        brought.reads.leave()
        with torch._functorch.eager_transforms.grad_increment_nesting() as level:
            getattr(torch._functorch.eager_transforms, wrap)(brought.layer.weight, level)
        assert len(brought.indices) == index + 1


def test_an_error_reaches_the_reader_each_time() -> None:
    brought = Brought()
    brought.error = PeerLost("worker 1 has gone")
    brought.reads.leave()
    for _ in range(2):
        with pytest.raises(PeerLost, match="worker 1 has gone"):
            brought.layer.weight.sum()
    brought.reads.all_came()
    brought.layer.weight.sum()
    assert brought.indices == [0, 0]


def test_a_process_that_was_forked_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = Brought()
    brought.reads.leave()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match=r"a process that was started after step\(\), "):
        brought.layer.weight.tolist()
    assert brought.indices == []


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_processes_share_is_waited_for_in_the_step(shared: bool) -> None:
    brought = Brought(nn.Linear(3, 2).share_memory() if shared else nn.Linear(3, 2))
    brought.reads.leave()
    brought.reads.read_aliased()
    assert brought.indices == [0, 1] * shared
