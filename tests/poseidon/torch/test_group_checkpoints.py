"""A group that continues from a saved state: the bits of one that never stopped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon
from poseidon.engine.leaf import packed, unpacked
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import Buffers, DistributeOptions
from poseidon.torch.update_rules import SGD, Adam
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import How, RecordingJob, failures_of, together

RECORDS, BATCH = 20, 4
ADAM = Adam(lr=lambda step: 0.05 / (1 + step), eps=1e-3)
MOMENTUM = SGD(lr=0.1, momentum=0.9, weight_decay=0.01)


def torch_adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-3)


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(RECORDS, 6, generator=numbers), torch.randn(RECORDS, 2, generator=numbers)
    )


def build(_: int) -> nn.Module:
    """A wide layer that may travel as factors, small tensors that share a table, running
    statistics, a frozen one.
    """
    net = nn.Sequential(
        nn.Linear(6, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 2), nn.Linear(2, 2)
    )
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.5, 0.5, generator=numbers)
    net[4].requires_grad_(False)
    return net


Save = Callable[[Group, int], object]


def loop(
    *, epochs: int = 3, passes: int = 1, after: Save | None = None
) -> Callable[[nn.Module, Group], None]:
    """Trains to the end; `after(group, steps)` is called after each step, and may raise
    StopIteration to end it there.
    """

    def body(module: nn.Module, group: Group) -> None:
        loader = group.loader(data(), BATCH)
        scheduler = None
        if isinstance(group._update, WorkerOptimizerUpdate):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(group._update.optimizer, 0.5)
            group.keep(scheduler=scheduler)
        begin(group)
        for _ in range(loader.sampler.epoch, epochs):  # type: ignore[attr-defined]
            for x, y in loader:
                (nn.functional.mse_loss(module(x), y) / passes).backward()
                if group.pending == passes or loader.position == len(loader):
                    group.step()
                    module.zero_grad()
                    if after is not None and after(group, group.steps) is STOP:
                        return
            if scheduler is not None:
                scheduler.step()

    saved: dict[str, Any] = {}

    def begin(group: Group) -> None:
        if saved:
            group.load_state_dict(copy.deepcopy(saved["state"]) if group.rank == 0 else None)

    body.saved = saved  # type: ignore[attr-defined]
    return body


STOP = object()


def saving(at: int) -> tuple[dict[str, Any], Save]:
    kept: dict[str, Any] = {}

    def after(group: Group, steps: int) -> object:
        if steps == at:
            state = group.state_dict()
            if group.rank == 0:
                kept["state"] = unpacked(packed(state), "a test")  # as from a file
            return STOP
        return None

    return kept, after


def interrupted(
    workers: int, how: How, at: int, *, passes: int = 1, **settings: Any
) -> list[dict[str, Tensor]]:
    kept, after = saving(at)
    together(workers, build, how, loop(passes=passes, after=after), **settings)
    return ended(workers, how, kept, passes=passes, **settings)


def ended(
    workers: int, how: How, kept: dict[str, Any], *, passes: int = 1, **settings: Any
) -> list[dict[str, Tensor]]:
    again = loop(passes=passes)
    again.saved.update(kept)  # type: ignore[attr-defined]
    return together(workers, build, how, again, **settings)


def assert_same_bits(ends: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(ends) == len(expected)
    for mine, theirs in zip(ends, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), name


def member(kind: ExchangeKind, staleness: int = 0) -> Membership:
    return Membership(
        network=Network(timeout_s=TIMEOUT_S),
        options=ExchangeOptions(kind=kind, staleness=staleness),
    )


def leaves_out(module: nn.Module, group: Group, steps: range) -> None:
    """Leave out the optimizer's step in every third iteration, as a GradScaler may."""
    assert isinstance(group._update, WorkerOptimizerUpdate)
    x, y = data().tensors
    for step in steps:
        own = slice(group.rank, None, group.size)
        nn.functional.mse_loss(module(x[own]), y[own]).backward()
        group.average_gradients()
        if step % 3:
            group.step()
        module.zero_grad()


def test_a_left_out_step_counts_as_an_iteration_of_the_exchange_only() -> None:
    """The positions that a codec draws follow from the iteration, so a resumed run needs it."""
    saved: dict[str, Any] = {}

    def save(module: nn.Module, group: Group) -> None:
        leaves_out(module, group, range(5))
        assert group.steps == 3
        state = group.state_dict()
        if group.rank == 0:
            saved.update(state)

    def resume(module: nn.Module, group: Group) -> None:
        group.load_state_dict(copy.deepcopy(saved) if group.rank == 0 else None)
        assert group.steps == 3
        leaves_out(module, group, range(5, 9))
        assert group.steps == 6

    job = member(ExchangeKind.SERVER)
    job = replace(job, options=replace(job.options, compress="*.weight=randomk:0.2"))
    together(2, build, torch_adam, save, member=job)
    assert (saved["steps"], saved["iterations"]) == (3, 5)
    whole = together(2, build, torch_adam, lambda m, g: leaves_out(m, g, range(9)), member=job)
    assert_same_bits(together(2, build, torch_adam, resume, member=job), whole)


KINDS = [kind for kind in ExchangeKind if kind not in (ExchangeKind.LOCAL, ExchangeKind.AUTO)]
"""Not `auto`: a script that resumes measures again, and bits depend on the plan."""


@pytest.mark.parametrize(
    ("kind", "how"), list(zip(KINDS, [ADAM, torch_adam, torch_adam, ADAM], strict=True))
)
def test_within_an_epoch(how: How, kind: ExchangeKind) -> None:
    """After 3 of an epoch's 5 steps, or 2 of 4 (two workers read 10 records each)."""
    settings: dict[str, Any] = {
        "options": DistributeOptions(batch_size=BATCH, clip=0.5),
        "member": member(kind),
    }
    expected = together(2, build, how, loop(), **settings)
    assert_same_bits(interrupted(2, how, 5, **settings), expected)


@pytest.mark.parametrize(
    ("how", "workers", "at"), [(MOMENTUM, 3, 1), (torch_adam, 1, 4), (torch_adam, 3, 4)]
)
def test_with_passes_that_add_up(how: How, workers: int, at: int) -> None:
    settings: dict[str, Any] = {
        "options": DistributeOptions(batch_size=BATCH, passes=2),
        "passes": 2,
    }
    expected = together(workers, build, how, loop(passes=2), options=settings["options"])
    assert_same_bits(interrupted(workers, how, at, **settings), expected)


def test_stale_workers_go_on_alike_each_with_its_own_history() -> None:
    settings: dict[str, Any] = {
        "options": DistributeOptions(batch_size=BATCH),
        "member": member(ExchangeKind.HYBRID, staleness=1),
    }
    kept, after = saving(5)
    (saved, _) = together(2, build, MOMENTUM, loop(after=after), **settings)
    histories = [own["history"]["0.bias"][0] for own in kept["state"]["own"]]
    assert not torch.equal(*histories)
    assert_same_bits([saved], [kept["state"]["model"]])

    def body(module: nn.Module, group: Group) -> None:
        group.load_state_dict(kept["state"])
        (own,) = group._update._histories._split()[0]
        assert torch.equal(own["0.bias"][0], histories[group.rank])
        for name, value in module.state_dict().items():
            assert torch.equal(value, kept["state"]["model"][name]), name

    together(2, build, MOMENTUM, body, **settings)
    again = loop()
    again.saved.update(kept)  # type: ignore[attr-defined]
    first, second = together(2, build, MOMENTUM, again, **settings)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, msg=name)
    with_mean = loop()
    with_mean.saved.update(kept)  # type: ignore[attr-defined]
    # at staleness 0: from the mean history
    together(2, build, MOMENTUM, with_mean, member=member(ExchangeKind.SERVER))


@pytest.mark.parametrize(
    ("compress", "how"),
    [
        ("0.weight=topk:0.1,*=sign", MOMENTUM),
        ("0.weight=none/int8,*=sign/none", torch_adam),
        ("*=topk:0.1/int8", torch_adam),
        ("*=powersgd:1:start=3,*=int8", MOMENTUM),
        ("*=powersgd:1:int8:start=3", torch_adam),
        ("*=auto:0.01", MOMENTUM),
    ],
)
def test_what_codecs_hold_back_is_in_the_state(how: How, compress: str) -> None:
    options = replace(member(ExchangeKind.SERVER).options, compress=compress)
    settings: dict[str, Any] = {"member": replace(member(ExchangeKind.SERVER), options=options)}
    expected = together(3, build, how, loop(), **settings)
    kept, after = saving(5)
    together(3, build, how, loop(after=after), **settings)
    assert_same_bits(ended(3, how, copy.deepcopy(kept), **settings), expected)
    for own in kept["state"]["own"]:
        own["held_back"].clear()
    ends = ended(3, how, kept, **settings)
    assert not torch.equal(ends[0]["0.weight"], expected[0]["0.weight"])


@pytest.mark.parametrize("compress", ["*=int8", "*=powersgd:1"])
def test_codecs_of_outer_gradients(compress: str) -> None:
    """Saved at the end of a round: an earlier end would be another run."""
    options = replace(
        member(ExchangeKind.SERVER).options, compress=compress, local_steps=2, outer_momentum=0.5
    )
    settings: dict[str, Any] = {"member": replace(member(ExchangeKind.SERVER), options=options)}
    expected = together(2, build, MOMENTUM, loop(), **settings)
    assert_same_bits(interrupted(2, MOMENTUM, 4, **settings), expected)


def test_what_another_module_held_back_is_refused() -> None:
    options = replace(member(ExchangeKind.SERVER).options, compress="*=int8")
    settings: dict[str, Any] = {"member": replace(member(ExchangeKind.SERVER), options=options)}
    kept, after = saving(5)
    together(2, build, MOMENTUM, loop(after=after), **settings)
    held_back = kept["state"]["own"][0]["held_back"]
    assert sorted(held_back)[:2] == ["0.bias, pushes of 0", "0.bias, values"]
    assert sorted(kept["state"]["own"][1]["held_back"])[:2] == [
        "0.bias, pushes of 1",
        "0.weight, pushes of 1",
    ]
    held_back["0.bias, pushes of 0"] = held_back["0.bias, pushes of 0"][:-1]
    with pytest.raises(SnapshotError, match=r"holds back 29 elements of 0\.bias, pushes of 0"):
        together(
            2, build, MOMENTUM, lambda _, group: group.load_state_dict(kept["state"]), **settings
        )


def test_each_worker_has_its_own_buffers_again() -> None:
    settings: dict[str, Any] = {
        "options": DistributeOptions(buffers=Buffers.OWN),
        "member": member(ExchangeKind.SERVER),
    }
    expected = together(2, build, MOMENTUM, loop(), **settings)
    assert not torch.equal(expected[0]["1.running_mean"], expected[1]["1.running_mean"])
    assert_same_bits(interrupted(2, MOMENTUM, 5, **settings), expected)


def shaken(x: Tensor) -> Tensor:
    """Of each generator a number."""
    return x + random.random() * 0.1 + np.random.random() * 0.1 + torch.rand(()) * 0.1


class Shaken(TensorDataset):
    """Augmented where it is read, as in a DataLoader without processes of its own."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return shaken(x), y


@pytest.mark.parametrize(
    "at", [2, 5, 7], ids=["within", "at the end of an epoch", "within the second"]
)
@pytest.mark.parametrize("plain", [False, True], ids=["loader", "sampler"])
def test_random_numbers_go_on(at: int, plain: bool) -> None:
    def run(saved: dict[str, Any], after: Save | None = None) -> dict[str, Tensor]:
        def body(module: nn.Module, group: Group) -> None:
            records = Shaken(*data().tensors)
            if plain:
                loader = DataLoader(records, BATCH, sampler=group.sampler(records))
            else:
                loader = group.loader(records, BATCH)
            if saved:
                group.load_state_dict(saved["state"])
            for _ in range(loader.sampler.epoch, 2):  # type: ignore[attr-defined]
                for x, y in loader:
                    nn.functional.mse_loss(nn.functional.dropout(module(x)), y).backward()
                    group.step()
                    if after is not None and after(group, group.steps) is STOP:
                        return

        with torch.random.fork_rng():
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(9)
            (end,) = together(1, build, MOMENTUM, body)
        return end

    expected = run({})
    kept, after = saving(at)
    run({}, after)
    assert_same_bits([run(kept)], [expected])


@pytest.mark.parametrize("at", [2, 3, 5, 7])
@pytest.mark.parametrize("plain", [False, True], ids=["loader", "sampler"])
def test_a_loader_of_each_epoch_continues_the_epochs_of_the_one_before(
    plain: bool, at: int
) -> None:
    records = data()
    in_epoch = -(-len(records) // BATCH)

    def make(group: Group) -> Any:
        if plain:
            return DataLoader(records, BATCH, sampler=group.sampler(records))
        return group.loader(records, BATCH)

    def run(saved: dict[str, Any], each: bool, after: Save | None = None) -> dict[str, Tensor]:
        def body(module: nn.Module, group: Group) -> None:
            loader = None if each else make(group)
            if saved:
                group.load_state_dict(saved["state"])
            for _ in range(group.steps // in_epoch, 3):
                for x, y in loader or make(group):
                    nn.functional.mse_loss(module(x), y).backward()
                    group.step()
                    if group.steps % in_epoch and after and after(group, group.steps) is STOP:
                        return
                if after and after(group, group.steps) is STOP:
                    return

        (end,) = together(1, build, MOMENTUM, body)
        return end

    expected = run({}, each=False)
    assert_same_bits([run({}, each=True)], [expected])
    kept, after = saving(at)
    run({}, True, after)
    assert_same_bits([run(kept, each=True)], [expected])


def test_a_loop_that_continues_after_a_later_one_over_its_records_is_refused() -> None:
    group = poseidon.distribute(build(0), MOMENTUM)
    records = data()
    first, other = group.loader(records, BATCH), group.loader(records, BATCH)
    assert len(list(zip(first, other, strict=True))) == len(first)  # made before any loop
    batches = iter(first)
    next(batches)
    next(iter(group.loader(records, BATCH, seed=1)))
    next(batches)
    next(iter(group.loader(records, BATCH)))
    with pytest.raises(UsageError, match="after a later loop over the same records has begun"):
        next(batches)


def test_what_processes_of_a_loader_have_drawn_ahead_was_not_had() -> None:
    group = poseidon.distribute(build(0), MOMENTUM)
    loader = group.loader(data(), BATCH, num_workers=1, prefetch_factor=2)
    batches = iter(loader)
    expected = [x for x, _ in group.loader(data(), BATCH)]
    assert torch.equal(next(batches)[0], expected[0])
    state = group.state_dict()
    assert state["own"][0]["samplers"][0]["position"] == BATCH
    again = poseidon.distribute(build(0), MOMENTUM)
    again.load_state_dict(state)
    loader = again.loader(data(), BATCH)  # made after its state was loaded
    assert (loader.sampler.epoch, loader.position) == (0, 1)  # type: ignore[attr-defined]
    for mine, theirs in zip(loader, expected[1:], strict=True):
        assert torch.equal(mine[0], theirs)


def steps(module: nn.Module, group: Group, count: int) -> None:
    for _ in range(count):
        module(torch.ones(2, 6)).square().mean().backward()
        group.step()


def test_a_group_saves_and_resumes_by_prefix(tmp_path: Path) -> None:
    prefix = tmp_path / "new folder" / "net"
    module = build(0)
    with poseidon.distribute(module, ADAM) as group:
        assert not group.resume(prefix)
        for _ in range(3):
            steps(module, group, 1)
            path = group.save(prefix, keep=2)
    assert path == prefix.with_name("net_iter_3.pt")
    names = [f"net_iter_{n}.pt{end}" for n in (2, 3) for end in ("", ".sha256")]
    held = ".net.running"  # while this process runs
    assert sorted(p.name for p in prefix.parent.iterdir()) == sorted([held, *names])
    plain = nn.Sequential(*build(0).children())
    plain.load_state_dict(torch.load(path)["model"])  # weights_only, torch's default, and no group
    assert torch.equal(plain[0].weight, module[0].weight)  # type: ignore[index]
    path.write_bytes(path.read_bytes()[:-1])  # the newest is damaged: the one before counts
    again = build(0)
    with poseidon.distribute(again, ADAM) as group:
        assert group.resume(prefix)
        assert group.steps == 2
        steps(again, group, 1)
    assert_same_bits([dict(again.state_dict())], [dict(module.state_dict())])


def test_a_job_tells_what_it_goes_on_from_and_hears_of_what_is_saved(tmp_path: Path) -> None:
    module, job = build(0), RecordingJob()
    context = WorkerContext(folder=tmp_path, job=job)
    group = join(module, MOMENTUM, DistributeOptions(), context)
    steps(module, group, 2)
    path = group.save()
    assert path == tmp_path / "checkpoint_iter_2.pt"
    assert [(written.state, written.iteration) for written in job.written] == [(path, 2)]
    again = build(0)
    group = join(again, MOMENTUM, DistributeOptions(), WorkerContext(checkpoint=path))
    with pytest.raises(UsageError, match=r"continues from .*checkpoint_iter_2.pt"):
        steps(again, group, 1)
    assert group.resume()
    assert group.steps == 2


def resumed(
    state: dict[str, Any], how: How = MOMENTUM, make: Callable[[int], nn.Module] = build
) -> None:
    together(1, make, how, lambda module, group: group.load_state_dict(state))


def test_what_does_not_fit_is_one_sentence() -> None:
    module = build(0)
    group = poseidon.distribute(module, MOMENTUM)
    steps(module, group, 1)
    state = group.state_dict()
    with pytest.raises(SnapshotError, match=r"trained with poseidon\.SGD"):
        resumed(state, ADAM)
    with pytest.raises(SnapshotError, match=r"poseidon\.SGD, and .* torch\.optim\.AdamW"):
        resumed(state, torch_adam)
    with pytest.raises(SnapshotError, match=r"is of a different module: .*0\.weight"):
        resumed(state, make=lambda _: nn.Sequential(nn.Linear(6, 2)))
    with pytest.raises(SnapshotError, match="keeps scheduler; this script has handed nothing"):
        resumed({**state, "kept": {"scheduler": {}}})
    with pytest.raises(SnapshotError, match="is not a checkpoint of a group"):
        resumed(dict(module.state_dict()))
    with pytest.raises(SnapshotError, match="has format 99"):
        resumed({**state, "poseidon": 99})
    with pytest.raises(UsageError, match="loaded only before the first step"):
        group.load_state_dict(state)
    with pytest.raises(UsageError, match="None on rank 0"):
        poseidon.distribute(build(0), MOMENTUM).load_state_dict(None)
    for kept in (3, object()):
        with pytest.raises(UsageError, match="expected something with state_dict"):
            poseidon.distribute(build(0), MOMENTUM).keep(scheduler=kept)
    module(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UsageError, match="between a backward pass and its step"):
        group.state_dict()


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"poseidon": 1, "steps": Path("x")}, tmp_path / "net_iter_1.pt")
    context = WorkerContext(checkpoint=tmp_path / "net_iter_1.pt")
    group = join(build(0), MOMENTUM, DistributeOptions(), context)
    with pytest.raises(SnapshotError, match=r"net_iter_1\.pt is not a checkpoint of a group"):
        group.resume()


def test_another_order_is_refused_within_an_epoch() -> None:
    group = poseidon.distribute(build(0), MOMENTUM)
    next(iter(group.loader(data(), BATCH)))
    state = group.state_dict()
    again = poseidon.distribute(build(0), MOMENTUM)
    again.load_state_dict(state)
    with pytest.raises(UsageError, match="a sampler with seed 0, and this one has 1"):
        again.loader(data(), BATCH, seed=1)


@pytest.mark.parametrize("how", [MOMENTUM, torch_adam], ids=["rule", "optimizer"])
def test_a_state_without_one_of_its_parts_is_refused(how: How) -> None:
    module = build(0)
    with poseidon.distribute(module, how if isinstance(how, SGD) else how(module)) as group:  # type: ignore[arg-type]
        state = group.state_dict()
        (own,) = state["own"]
        broken = [
            {k: v for k, v in state.items() if k != part} for part in state if part != "outer"
        ]
        broken += [
            {**state, "own": [{k: v for k, v in own.items() if k != part}]}
            for part in own
            if part not in state
        ]
        for one in (*broken, {**state, "own": [own, own]}, {**state, "own": [3]}):
            with pytest.raises(SnapshotError):
                group.load_state_dict(one)
        group.load_state_dict(state)


def test_a_run_that_computes_differently_says_so(tmp_path: Path) -> None:
    job = RecordingJob()
    context = WorkerContext(folder=tmp_path, job=job)
    path = join(build(0), MOMENTUM, DistributeOptions(), context).save()
    again = WorkerContext(checkpoint=path, job=job)
    assert join(build(0), MOMENTUM, DistributeOptions(), again).resume()
    assert not any("computed" in sentence for sentence in job.said)
    torch.use_deterministic_algorithms(True)
    try:
        assert join(build(0), MOMENTUM, DistributeOptions(), again).resume()
    finally:
        torch.use_deterministic_algorithms(False)
    (sentence,) = [sentence for sentence in job.said if "computed" in sentence]
    assert sentence.startswith(f"{path} was computed with ")
    assert ", float32, and this run computes with " in sentence
    assert ", float32, deterministic kernels: it continues correctly" in sentence


@pytest.mark.parametrize("how", [MOMENTUM, torch_adam], ids=["rule", "torch"])
def test_the_default_device_of_a_script_is_its_own(how: How) -> None:
    """As torch.set_default_device("cuda"). A tensor on torch's meta device has no values."""
    x, y = data().tensors

    def trained(*, by_default: bool) -> list[dict[str, Tensor]]:
        kept: dict[str, Any] = {}
        ends: dict[int, dict[str, Tensor]] = {}

        def run(rank: int, context: WorkerContext) -> None:
            module = build(rank)
            applied = how if isinstance(how, SGD) else how(module)  # type: ignore[operator]
            default = torch.device("meta") if by_default else nullcontext()
            with default, join(module, applied, DistributeOptions(), context) as group:
                if kept:
                    group.load_state_dict(copy.deepcopy(kept["state"]) if rank == 0 else None)
                for _ in range(2):
                    nn.functional.mse_loss(module(x[rank::2]), y[rank::2]).backward()
                    group.step()
                state = group.state_dict()
                group.settle()
            if rank == 0:
                last.append(unpacked(packed(state), "a test"))
            ends[rank] = copy.deepcopy(module.state_dict())

        for _ in range(2):
            last: list[Any] = []
            for failure in failures_of(2, run):
                raise failure
            kept["state"] = last[0]
        return [ends[0], ends[1]]

    assert_same_bits(trained(by_default=True), trained(by_default=False))
