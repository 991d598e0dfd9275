"""Bits depend on the number of virtual workers, not on the number of processes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import poseidon
from poseidon.errors import PoseidonError, UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import Buffers, DistributeOptions, Outer, RunsOn
from poseidon.torch.tables.table import Table
from poseidon.torch.update_rules import SGD
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from tests.support.module_groups import BUILDING, How, member, together
from tests.support.thread_streams import generator, streams_of_threads

RECORDS, BATCH, TOKENS = 72, 3, 5


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    with streams_of_threads():
        yield


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=generator()) < 0.8) / 0.8


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Records that are augmented in this process."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(index)
        words = torch.randint(8, (TOKENS,), generator=own)
        return words, words.float().mean() + 0.01 * torch.rand((), generator=generator())


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6)
        self.last = nn.Linear(6, 1)
        self.dropout = Dropout()

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.dropout(self.attention(x, x, x, need_weights=False)[0])
        x = x + self.narrow(self.dropout(torch.relu(self.wide(self.norm(x)))))
        result: Tensor = self.last(x.mean(1)).squeeze(1)
        return result


class Normed(nn.Module):
    """Running statistics, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(TOKENS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.dropout = Dropout()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("kept", torch.ones(2), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(words.to(self.seen.dtype) / 8))))
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.5).add_(x.mean())
        result: Tensor = self.last(x).squeeze(1) + 0.1 * self.seen.sum()
        return result


class Normed16(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


def built(kind: type[nn.Module]) -> Callable[[int], nn.Module]:
    def build(rank: int) -> nn.Module:
        with BUILDING, torch.random.fork_rng():
            torch.manual_seed(rank)
            return kind()

    return build


@dataclass(frozen=True)
class Case:
    module: type[nn.Module]
    how: How
    options: Mapping[str, Any]
    kind: ExchangeKind = ExchangeKind.HYBRID


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


LOCAL = {"local_steps": 4}
STREAMED = {"local_steps": 4, "outer": Outer(fragments=2, delay=1, mix=0.25)}
RULE = SGD(lr=lambda step: 0.05 / (1 + step), momentum=0.9, weight_decay=0.01)
CASES = {
    "transformer": Case(Transformer, adamw, {"clip": 0.5}),
    "transformer, factors": Case(Transformer, RULE, {"batch_size": BATCH}, ExchangeKind.FACTORS),
    "normed": Case(Normed, RULE, {}),
    "normed, all-reduce": Case(Normed, RULE, {"clip": 0.1}, ExchangeKind.ALLREDUCE),
    "normed, 16 bits": Case(Normed16, RULE, {}),
    "normed, a codec": Case(Normed, RULE, {"compress": "int8"}),
    "normed, own statistics": Case(Normed, adamw, {"buffers": Buffers.OWN}),
    "normed, on the shards": Case(
        Normed, lambda net: [adamw(net)], {"on": RunsOn.SHARDS, "passes": 2}, ExchangeKind.SERVER
    ),
    "transformer, local steps": Case(Transformer, adamw, {**LOCAL, "clip": 0.5, "passes": 2}),
    "normed, local steps": Case(Normed, sgd, STREAMED, ExchangeKind.SERVER),
    "normed, 16 bits, local steps": Case(Normed16, RULE, LOCAL),
}


def train(
    group: Group, module: nn.Module, epochs: int, loader: Any = None, *, evaluates: bool = True
) -> None:
    """The loop of a user, which evaluates between two steps; within rounds of local steps too."""
    passes = group._loop.update.plan.options.passes
    every = 3 if group._loop.exchanged.observed.built.plan.local_steps else 1
    loader = loader if loader is not None else group.loader(Words(), BATCH)
    for _ in range(loader.sampler.epoch, epochs):
        for words, mean in loader:
            loss = (module(words) - mean).square().mean() / passes
            loss.backward()
            if group.pending < passes or not group.step():
                continue
            if evaluates and group.steps % every == 0:
                group.settle()
                with torch.no_grad():
                    module.eval()(next(iter(DataLoader(Words(), 4, generator=generator())))[0])
                    module.train()


def digest(end: Mapping[str, Tensor]) -> str:
    parts = (value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in end.values())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def trained(
    case: Case, processes: int, virtual: int, body: Callable[[nn.Module, Group], None] | None = None
) -> str:
    """Return the digest of rank 0's weights and buffers."""
    ends = together(
        processes,
        built(case.module),
        case.how,
        body or (lambda module, group: train(group, module, 1)),
        options=DistributeOptions(virtual_workers=virtual, **case.options),
        member=member(case.kind),
    )
    return digest(ends[0])


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        *((name, (1, 3)) for name in CASES if name != "normed, a codec"),
        ("normed, a codec", (2, 3)),  # one process encodes nothing
        pytest.param("normed", (1, 2, 4), marks=pytest.mark.thorough),
    ],
)
def test_any_number_of_processes_has_the_same_bits(name: str, processes: Sequence[int]) -> None:
    found = {number: trained(CASES[name], number, 4) for number in processes}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        (Case(Normed, adamw, {"buffers": Buffers.OWN}), (4, 2, 1)),
        (Case(Normed, RULE, {"compress": "int8"}), (4, 2, 3)),
        (Case(Normed, adamw, {"local_steps": 5}), (4, 2, 3)),
        (Case(Normed, RULE, STREAMED, ExchangeKind.SERVER), (4, 1, 3)),
    ],
)
def test_a_checkpoint_goes_on_with_any_number_of_processes(
    case: Case, processes: tuple[int, int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first make 4 steps, within the first epoch; the second 4, into the second epoch."""

    def until(steps: int, name: str = "net") -> Callable[[nn.Module, Group], None]:
        def body(module: nn.Module, group: Group) -> None:
            loader = group.loader(Words(), BATCH)
            assert group.resume(tmp_path / name) == (steps > 4 and name == "net")
            for _ in range(loader.sampler.epoch, 2):
                for words, mean in loader:
                    (module(words) - mean).square().mean().backward()
                    if group.step() and group.steps % 4 == 0:
                        group.save(tmp_path / name)
                        if group.steps == steps:
                            return

        return body

    parts = [trained(case, p, 4, until(4 * n)) for n, p in enumerate(processes, start=1)]
    assert parts[-1] == trained(case, 3, 4, until(12, "whole"))
    saved = torch.load(tmp_path / "net_iter_12.pt")
    assert (saved["workers"], len(saved["own"])) == (4, 4)
    assert len({state["random"]["torch"].numpy().tobytes() for state in saved["own"]}) == 4

    caplog.set_level(logging.INFO)

    def resume(module: nn.Module, group: Group) -> None:
        assert group.resume(tmp_path / "net")

    trained(case, 2, 3, resume)
    assert "is of 4 workers, and this job has 3: random states start from the seed" in caplog.text


def by_sampler(module: nn.Module, group: Group) -> None:
    sampler = group.sampler(Words(), batch_size=BATCH)
    train(group, module, 2, DataLoader(Words(), BATCH, sampler=sampler, generator=generator()))


def with_unequal_batches(module: nn.Module, group: Group) -> None:
    for words, mean in group.loader(Words(), 5, even=False):
        group.weigh((module(words) - mean).square().mean()).backward()
        group.step()


def by_number(module: nn.Module, group: Group) -> None:
    words, means = (
        torch.stack(part) for part in zip(*map(Words().__getitem__, range(RECORDS)), strict=True)
    )
    assert group.virtual_workers == 3
    while group.steps < 4:
        own = slice(group.virtual_worker, None, group.virtual_workers)
        (module(words[own]) - means[own]).square().mean().backward()
        group.step()


def clipping(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    for words, mean in group.loader(Words(), BATCH):
        (module(words) - mean).square().mean().backward()
        if group.average_gradients():
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            group.step()


def by_the_optimizer(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    optimizer = group._update.optimizer
    for words, mean in group.loader(Words(), BATCH):
        optimizer.zero_grad()
        (module(words) - mean).square().mean().backward()
        optimizer.step()


def with_evaluations(module: nn.Module, group: Group) -> None:
    """Each virtual worker has its part of the records to test, which are augmented too."""
    tested = group.loader(Words(), 4, even=False)
    for words, mean in group.loader(Words(), BATCH):
        (module(words) - mean).square().mean().backward()
        if group.step() and group.steps % 3 == 0:
            module.eval()
            with torch.no_grad():
                for others, _ in tested:
                    module(others)
            module.train()


def with_a_scaler(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    scaler = torch.amp.GradScaler("cpu")
    for words, mean in group.loader(Words(), BATCH):
        loss: Tensor = scaler.scale((module(words) - mean).square().mean())
        loss.backward()
        if group.average_gradients():
            scaler.step(group._update.optimizer)
            scaler.update()
            module.zero_grad()


def with_a_scheduler(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(group._update.optimizer, 0.5)
    for words, mean in group.loader(Words(), BATCH):
        (module(words) - mean).square().mean().backward()
        if group.step():
            scheduler.step()


LOOPS = [
    by_sampler,
    with_unequal_batches,
    by_number,
    clipping,
    by_the_optimizer,
    with_evaluations,
    with_a_scaler,
    with_a_scheduler,
]


@pytest.mark.parametrize("body", LOOPS)
def test_loops_of_users_have_the_same_bits(body: Callable[[nn.Module, Group], None]) -> None:
    found = {trained(Case(Normed, adamw, {}), processes, 3, body) for processes in (1, 2)}
    assert len(found) == 1


def a_pass(module: nn.Module, group: Group) -> None:
    module(torch.ones(2, TOKENS)).square().mean().backward()


def saves_within_a_step(module: nn.Module, group: Group) -> None:
    a_pass(module, group)
    assert not group.step()
    group.save("net")


def steps_a_scheduler_each_time(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(group._update.optimizer, 0.5)
    for _ in range(2):
        a_pass(module, group)
        group.step()
        scheduler.step()


def leaves_a_batch_out(module: nn.Module, group: Group) -> None:
    for at, (words, _) in enumerate(group.loader(Words(), BATCH)):
        if at:
            module(words).mean().backward()


def puts_another_buffer(module: nn.Module, group: Group) -> None:
    a_pass(module, group)
    module.seen = torch.zeros(2)
    group.step()


def seeds(module: nn.Module, group: Group) -> None:
    generator().manual_seed(1_234_567)
    next(iter(group.loader(Words(), BATCH)))


def keeps_gradients(module: nn.Module, group: Group) -> None:
    a_pass(module, group)
    group.step(zero_grad=False)


def drops(module: nn.Module, group: Group) -> None:
    a_pass(module, group)
    group.drop()


REFUSED: dict[str, tuple[Callable[[nn.Module, Group], object], str]] = {
    "save": (saves_within_a_step, r"save\(\) comes after the step\(\) of virtual worker 0, and th"),
    "scheduler": (steps_a_scheduler_each_time, r"lr has changed from \[0.01\] to \[0.005\] betwe"),
    "batch": (
        leaves_a_batch_out,
        "the module runs on the batch of virtual worker 1, but the next ",
    ),
    "buffer": (puts_another_buffer, "the module has replaced the tensor of its buffer 's"),
    "seed": (seeds, r"torch's seed was set after distribute\(\)"),
    "gradients": (keeps_gradients, r"step\(zero_grad=False\) keeps the gradients for the next pa"),
    "drop": (drops, r"drop\(\), or another backward\(\), comes before step\(\)"),
    "sampler": (lambda _, group: group.sampler(Words()), r"sampler\(\) has no batch_size, and a w"),
    "weigh": (lambda _, group: group.weigh(torch.ones(()), 3), r"weigh\(\) was given the records"),
    "epoch": (lambda _, group: group.epoch([1]), r"epoch\(\) waits for the other workers before"),
    "keep_own": (lambda _, group: group.keep_own(a=nn.Linear(1, 1)), r"keep_own\(\) has a state f"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_worker_for_each_is_one_sentence(name: str) -> None:
    body, sentence = REFUSED[name]

    def run(module: nn.Module, group: Group) -> None:
        body(module, group)

    with pytest.raises(UsageError, match=sentence):
        trained(Case(Normed, adamw, {}), 1, 2, run)


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(4, 2)


class SyncNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.SyncBatchNorm(3))


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [(Tabled, {}, "table 'table' has sparse gradients"), (SyncNormed, {}, "in each forward pass")],
)
def test_a_module_that_needs_a_worker_for_each_is_refused(
    module: type[nn.Module], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        trained(Case(module, SGD(lr=0.1), options), 1, 2)


def test_a_block_that_ends_within_a_step_is_refused() -> None:
    module = Normed()
    with (
        pytest.raises(
            UsageError, match="worker 0 leaves the `with` block within step 1, before th"
        ),
        poseidon.distribute(module, RULE, virtual_workers=2) as group,
    ):
        a_pass(module, group)
        group.step()


def test_a_job_has_as_many_virtual_workers_as_workers_or_more() -> None:
    with pytest.raises(PoseidonError, match="virtual_workers is 2, and the job has 3 workers; exp"):
        trained(Case(Normed, RULE, {}), 3, 2)


def test_virtual_workers_alone_compute_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("poseidon.engine.this_process.are_threads_set", lambda: False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with poseidon.distribute(Normed(), RULE, virtual_workers=2):
            assert torch.get_num_threads() == 1
        assert "computing with 1 thread; OMP_NUM_THREADS=N" in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)
