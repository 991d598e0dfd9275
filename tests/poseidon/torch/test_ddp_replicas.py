"""The replicas of DistributedDataParallel: when they are compared, and what is compared."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from poseidon.errors import JobError
from poseidon.exchange.options import ExchangeOptions, OnDivergence
from poseidon.exchange.replicas import ReplicaCheck
from poseidon.torch.ddp_replicas import DdpReplicas, modules_compared, reduced_parameters
from poseidon.torch.process_group.functions import initialize, register
from poseidon.torch.process_group.mesh import Mesh
from ps_server.network import Network


class Wrapped(nn.Module):
    """What is used of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"own": nn.Linear(2, 1), "fc": nn.Linear(2, 1)})
        self.module["frozen"] = nn.Linear(2, 1).requires_grad_(False)
        self.parameters_to_ignore = {"own.weight", "own.bias"}
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self) -> None: ...


def test_the_parameters_are_those_that_torch_reduces() -> None:
    given: Any = Wrapped()
    given._assign_modules_buffers = lambda: None
    module = given.module
    module.register_parameter("own_of_the_root", nn.Parameter(torch.ones(2)))
    module["shared"] = nn.Linear(2, 1)
    module["shared"].weight, module["shared"].bias = module["own"].weight, module["fc"].bias
    given.parameters_to_ignore |= {"own_of_the_root", "shared.bias"}
    expected, _ = DistributedDataParallel._build_params_for_reducer(given)
    found = reduced_parameters(given)
    assert [*found] == ["own_of_the_root", "fc.weight", "fc.bias", "shared.weight"]
    assert all(one is other for one, other in zip(found.values(), expected, strict=True))


def run(
    steps: Sequence[int],
    change: Callable[[int, Wrapped], object],
    runs: Callable[[int, int], bool] = lambda rank, step: True,
    then: Callable[[int, Wrapped], object] = lambda rank, module: None,
    **options: Any,
) -> tuple[list[str], list[Wrapped]]:
    """Change the module of each of two workers before each comparison. Return what each raised.

    Args:
        change: before the forward pass.
        runs: whether a worker has one.
        then: changes it after the forward pass.
    """
    barrier, payloads = threading.Barrier(2, timeout=30), [b"", b""]
    said, modules = ["", ""], [Wrapped(), Wrapped()]

    def work(rank: int) -> None:
        def collect(payload: bytes) -> list[bytes]:
            payloads[rank] = payload
            barrier.wait()
            found = list(payloads)
            barrier.wait()
            return found

        given: Any = modules[rank]
        own = ExchangeOptions(**options)
        replicas = DdpReplicas(
            given,
            reduced_parameters(given),
            own,
            collect=collect,
            rank=rank,
            ranks=range(len(modules)),
        )
        try:
            for step in steps:
                change(rank, modules[rank])
                replicas._next = step
                if runs(rank, step):
                    modules[rank]()
                then(rank, modules[rank])
                replicas.compare(step)
        except JobError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said, modules


def on_rank_1(name: str, attribute: str = "weight") -> Callable[[int, Wrapped], object]:
    def change(rank: int, module: Wrapped) -> None:
        if rank:
            layer: Any = module.module[name]
            nn.init.zeros_(getattr(layer, attribute))

    return change


@pytest.mark.parametrize(
    ("steps", "options", "found"),
    [
        ((0,), {}, False),
        ((0, 1), {}, True),
        ((2,), {}, True),
        ((3, 5, 6, 7, 9, 999), {}, False),
        ((64,), {}, True),
        ((1000,), {}, True),
        ((15,), {"check_replicas": 5}, True),
        ((1, 2, 1000), {"check_replicas": 0}, False),
    ],
    ids=str,
)
def test_when_replicas_are_compared(
    steps: Sequence[int], options: dict[str, Any], found: bool
) -> None:
    said, _ = run(steps, on_rank_1("fc"), **options)
    sentence = (
        f"the replicas differ: 'fc.weight' on worker 1 is not as on worker 0 after iteration "
        f"{steps[-1]} (equal after iteration 0). Change"
    )
    assert [text[: len(sentence)] for text in said] == [sentence if found else ""] * 2


@pytest.mark.parametrize(("name", "found"), [("own", False), ("frozen", False), ("fc", True)])
def test_the_weights_that_are_compared(name: str, found: bool) -> None:
    said, _ = run([1], on_rank_1(name, "bias"))
    assert [bool(text) for text in said] == [found, found]


@pytest.mark.parametrize("joined", [0, 1])
def test_a_worker_whose_inputs_have_ended_is_left_out(joined: int) -> None:
    said, _ = run([1, 2], on_rank_1("fc"), lambda rank, _: rank != joined)
    assert said == ["", ""]


def test_worker_0s_weights_go_to_all() -> None:
    said, modules = run([1], on_rank_1("fc"), on_divergence=OnDivergence.MEND)
    assert said == ["", ""]
    layer: Any = modules[1].module["fc"]
    assert torch.equal(layer.weight, torch.ones(1, 2))
    assert layer.weight.grad is None


def trained(mesh: Mesh, others: Callable[[bytes], bytes], steps: int) -> DistributedDataParallel:
    """Train a module that the process group reduces, beside a worker that has the same gradients.

    Args:
        others: what the other worker gives for each payload of this one.
    """
    initialize(mesh)
    try:
        with modules_compared(ExchangeOptions(check_replicas=5)):
            module = DistributedDataParallel(nn.Linear(2, 1))
        for hook in module._forward_pre_hooks.values():
            owner = hook._hook.__self__  # type: ignore[attr-defined]
            if isinstance(owner, DdpReplicas):
                owner._check = ReplicaCheck(
                    owner._options,
                    state=owner._own,
                    collect=lambda own: [own, others(own)],
                    rank=0,
                    ranks=range(2),
                )
        for _ in range(steps):
            module(torch.ones(1, 2)).sum().backward()
        return copy.deepcopy(module)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    own = Mesh(Network(), lambda payload: [payload])
    register(own)
    yield own
    own.close()


def test_a_module_that_the_process_group_reduces_is_compared(mesh: Mesh) -> None:
    module = trained(mesh, lambda own: own, 8)
    assert not module._comm_hooks
    other = b'{"weight": "00000000"}'
    with pytest.raises(JobError, match=r"'weight' on worker 1 is not as on worker 0"):
        trained(mesh, lambda own: other, 3)


def by_hook(module: DistributedDataParallel) -> None:
    module.register_comm_hook(None, allreduce_hook)


def built_in(module: DistributedDataParallel) -> None:
    distributed: Any = torch.distributed
    module._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)


@pytest.mark.parametrize("register_hook", [by_hook, built_in])
def test_a_script_registers_a_hook_after_an_evaluation(
    mesh: Mesh, register_hook: Callable[[DistributedDataParallel], None]
) -> None:
    initialize(mesh)
    try:
        with modules_compared(ExchangeOptions(check_replicas=5)):
            module = DistributedDataParallel(nn.Linear(2, 1))
        with torch.no_grad():
            module(torch.ones(1, 2))
        register_hook(module)
        module(torch.ones(1, 2)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert module.module.weight.grad.tolist() == [[1, 1]]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_that_steps_within_backward(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch registers a hook of its own for it, which waits for a stream of the GPU."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    initialize(mesh)
    try:
        with modules_compared(ExchangeOptions(check_replicas=5)):
            module = DistributedDataParallel(model)
        module(torch.ones(1, 2)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(model.weight, before - 0.5)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_weights_that_differ_after_the_first_forward_pass(is_evaluation: bool) -> None:
    """As SAM moves them; an evaluation beside training, as of an average, does not count."""

    def moved(rank: int, module: Wrapped) -> None:
        layer: Any = module.module["fc"]
        before = layer.weight.detach().clone()
        nn.init.constant_(layer.weight, rank)
        with torch.set_grad_enabled(not is_evaluation):
            module()
        if is_evaluation:
            layer.weight.data.copy_(before)

    same: Callable[[int, Wrapped], object] = lambda rank, module: None  # noqa: E731
    change, then = (moved, same) if is_evaluation else (same, moved)
    said, _ = run([1, 2], change, runs=lambda rank, step: True, then=then)
    when = "" if is_evaluation else "after iteration 2 (equal after iteration 1)"
    assert all(when in text and bool(text) is not is_evaluation for text in said)
