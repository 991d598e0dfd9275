"""Tables and sparse embeddings in a module that several workers train: equal to one process."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import poseidon
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.alone import AloneRowTables
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions, RunsOn
from poseidon.torch.tables.group import read_rows, rows_path, write_rows
from poseidon.torch.tables.link import EmbeddingRows
from poseidon.torch.update_rules import UpdateRule
from ps_server import RowInit, RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.messages import Array, RowIds
from ps_server.row_rules import first_values
from tests.support.module_groups import BUILDING, How, member, together
from tests.support.sampling import sample

ROWS, DIM, WORKERS, STEPS = 30, 6, 3, 40
ADAM = poseidon.Adam(lr=0.02)
SGD = poseidon.SGD(lr=0.1)


class Net(nn.Module):
    """A sum of embeddings, and a layer."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        with BUILDING, torch.random.fork_rng():
            torch.manual_seed(3)
            self.last = nn.Linear(DIM, 2)

    def forward(self, indices: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.embedding(indices)).sum(1))
        return result


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of one process: WORKERS x 4 records of 3 indices; 29 is never among them."""
    random = torch.Generator().manual_seed(step)
    x = torch.randint(ROWS - 1, (WORKERS * 4, 3), generator=random)
    return x, torch.randn(WORKERS * 4, 2, generator=random)


def loop(steps: range, *, ahead: bool = False) -> Callable[[nn.Module, Group], None]:
    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, Net)
        for step in steps:
            x, y = (whole.chunk(group.size)[group.rank] for whole in batch(step))
            nn.functional.mse_loss(module(x), y).backward()
            if ahead:
                group.prefetch(module.embedding, batch(step + 1)[0].chunk(group.size)[group.rank])
            group.step()

    return body


def values(module: nn.Module) -> Tensor:
    """All rows of a Table, as they are now."""
    with torch.no_grad():
        found: Tensor = module(torch.arange(ROWS)).detach()
    return found


def table(rule: UpdateRule | None = None) -> poseidon.Table:
    return poseidon.Table(ROWS, DIM, rule=rule, scale=0.1, seed=5)


def torch_embedding() -> nn.Embedding:
    """An embedding with the first values of `table`."""
    first = first_values(RowInit.NORMAL, 0.1, 5, np.arange(ROWS, dtype=np.uint32), DIM)
    return nn.Embedding(ROWS, DIM, sparse=True, _weight=torch.from_numpy(first))


def one_process(
    sparse: Callable[[list[Tensor]], torch.optim.Optimizer], dense_lr: float
) -> dict[str, Tensor]:
    """The state after the same steps, by torch alone."""
    net = Net(torch_embedding())
    optimizers = [
        sparse([net.embedding.weight]),  # type: ignore[list-item]
        torch.optim.SGD(net.last.parameters(), lr=dense_lr),
    ]
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(net(x), y).backward()
        with torch.sparse.check_sparse_tensor_invariants():
            for optimizer in optimizers:
                optimizer.step()
        net.zero_grad()
    return net.state_dict()


RULES = {
    "sgd": (SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (ADAM, lambda p: torch.optim.SparseAdam(p, lr=0.02)),
    "adagrad": (poseidon.AdaGrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-10)),
}


@pytest.mark.parametrize("workers", [1, WORKERS])
@pytest.mark.parametrize("name", RULES)
def test_a_table_is_an_embedding_of_one_process(name: str, workers: int) -> None:
    rule, torchs = RULES[name]
    expected = one_process(torchs, 0.1)
    found: list[Tensor] = []

    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, Net)
        loop(range(STEPS), ahead=True)(module, group)
        group.settle()
        found.append(values(module.embedding))

    ends = together(workers, lambda _: Net(table(rule)), SGD, body)
    for rows, end in zip(found, ends, strict=True):
        assert "embedding.weight" not in end
        assert rows.numpy().tobytes() == found[0].numpy().tobytes()
        torch.testing.assert_close(rows, expected["embedding.weight"], rtol=0, atol=1e-6)
        torch.testing.assert_close(end["last.weight"], expected["last.weight"], rtol=0, atol=1e-6)
    untouched = expected["embedding.weight"][ROWS - 1]
    assert torch.equal(found[0][ROWS - 1], untouched)


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_a_sparse_embedding_is_that_of_one_process(workers: int) -> None:
    expected = one_process(lambda p: torch.optim.SGD(p, lr=0.1), 0.1)

    def build(rank: int) -> nn.Module:
        embedding = torch_embedding()
        if rank:  # rank 0's values count
            embedding.weight.data.zero_()
        return Net(embedding)

    for end in together(workers, build, SGD, loop(range(STEPS), ahead=True)):
        for key, value in expected.items():
            torch.testing.assert_close(end[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [ExchangeKind.AUTO, ExchangeKind.SERVER, ExchangeKind.FACTORS])
def test_a_module_of_tables_alone(kind: ExchangeKind) -> None:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = poseidon.Table(20, 4, seed=1)
            self.items = poseidon.Table(20, 4, seed=2)

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return (self.users(users) * self.items(items)).sum(-1)

    def body(module: nn.Module, group: Group) -> None:
        for step in range(10):
            users = (torch.arange(8) * (step + 1) % 20).chunk(group.size)[group.rank]
            items = ((torch.arange(8) + 3 * step) % 20).chunk(group.size)[group.rank]
            ((module(users, items) - 1) ** 2).mean().backward()
            group.step()
        group.settle()
        found.append(module.users(torch.arange(20)).detach())  # type: ignore[operator]

    found: list[Tensor] = []
    for workers in (1, 2):
        together(workers, lambda _: Factors(), ADAM, body, member=member(kind))
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def one_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_table_beside_an_optimizer_of_torch() -> None:

    expected = one_process(lambda p: torch.optim.SparseAdam(p, lr=0.02), 0.1)
    found: list[Tensor] = []

    def body(module: nn.Module, group: Group) -> None:
        loop(range(STEPS))(module, group)
        found.append(values(module.embedding))  # type: ignore[arg-type]

    together(WORKERS, lambda _: Net(table(ADAM)), one_optimizer, body)
    torch.testing.assert_close(found[0], expected["embedding.weight"], rtol=0, atol=1e-6)


def two_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    assert isinstance(module, Net)
    return [
        torch.optim.SparseAdam(module.embedding.parameters(), lr=0.02),
        torch.optim.SGD(module.last.parameters(), lr=0.1),
    ]


@pytest.mark.parametrize("workers", [1, WORKERS])
@pytest.mark.parametrize("case", ["one on workers", "one on shards", "two on shards"])
def test_a_sparse_embedding_follows_its_torch_optimizer(case: str, workers: int) -> None:
    number, place = case.split(" on ")
    how: Callable[[nn.Module], object] = one_optimizer if number == "one" else two_optimizers
    sparse = RULES["sgd" if number == "one" else "adam"][1]
    expected = one_process(sparse, 0.1)
    ends = together(
        workers,
        lambda _: Net(torch_embedding()),
        how,  # type: ignore[arg-type]
        loop(range(STEPS)),
        options=DistributeOptions(on=RunsOn(place)),
    )
    for end in ends:
        for key, value in expected.items():
            torch.testing.assert_close(end[key], value, rtol=0, atol=1e-6)


def test_the_rate_of_a_table_is_the_optimizers_present_one() -> None:
    def body(module: nn.Module, group: Group) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
        optimizers[0].load_state_dict(optimizers[0].state_dict())  # new groups, as in `resume`
        for _ in range(3):
            module(torch.tensor([1])).sum().backward()
            optimizers[0].step()
            scheduler.step()
        group.settle()
        found.append(module.weight.detach().clone())  # type: ignore[operator]

    def how(module: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(module.parameters(), lr=1.0))
        return optimizers[0]

    found: list[Tensor] = []
    for place in RunsOn:
        optimizers: list[torch.optim.Optimizer] = []
        embedding = nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
        together(1, lambda _, e=embedding: e, how, body, options=DistributeOptions(on=place))
    assert [rows.flatten().tolist() for rows in found] == 2 * [[0, -1.75, 0]]


def bags(mode: str) -> tuple[poseidon.Table, nn.EmbeddingBag]:
    made = poseidon.Table(ROWS, DIM, scale=0.1, seed=5, mode=mode, padding_idx=2)
    first = torch_embedding().weight.detach().clone()
    return made, nn.EmbeddingBag(ROWS, DIM, sparse=True, mode=mode, padding_idx=2, _weight=first)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_padding_and_repeated_indices(mode: str) -> None:
    own, torchs = bags(mode)
    indices = torch.tensor([4, 4, 2, 7, 2, 2, 9])
    offsets = torch.tensor([0, 3, 4, 6])  # the third bag is of padding only

    def body(module: nn.Module, group: Group) -> None:
        for _ in range(3):
            out = module(indices, offsets)
            outs.append(out.detach().clone())
            (out**2).sum().backward()
            group.step()

    outs: list[Tensor] = []
    together(1, lambda _: own, SGD, body)
    together(1, lambda _: torchs, SGD, body)
    for mine, theirs in zip(outs[:3], outs[3:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_batch_of_padding_only() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for step in range(6):
            indices = torch.full((4,), 2) if (group.rank + step) % 2 else torch.tensor([1, 2, 1, 3])
            out = module(indices)
            assert not out[1].any()
            out.sum().backward()
            group.step()
        with torch.no_grad():
            found.append(module(torch.tensor([1, 3, 4])))

    found: list[Tensor] = []
    together(
        2, lambda _: poseidon.Table(9, 2, init="zeros", padding_idx=2), poseidon.SGD(lr=1.0), body
    )
    # three of six batches of each worker have row 1 twice and row 3 once; the mean is over two
    assert found[0].tolist() == found[1].tolist() == [[-6, -6], [-3, -3], [0, 0]]


def test_passes_add_up_and_dropped_ones_do_not_count() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for indices in ([0, 1], [1, 2]):
            module(torch.tensor(indices)).sum().backward()
        group.step()
        module(torch.tensor([0, 3])).sum().backward()
        group.drop()
        with torch.no_grad():
            found.append(module(torch.arange(4)))

    found: list[Tensor] = []
    options = DistributeOptions(passes=2)
    for workers in (1, 2):
        together(
            workers,
            lambda _: poseidon.Table(4, 1, init="zeros"),
            poseidon.SGD(lr=1.0),
            body,
            options=options,
        )
    assert [rows.flatten().tolist() for rows in found] == [[-1, -2, -1, 0]] * 3


def small(kind: str) -> nn.Module:
    """A table of 11 rows."""
    if kind == "table":
        return poseidon.Table(11, 3, scale=0.1, seed=5)
    first = torch_embedding().weight.detach()[:11, :3].clone()
    if kind == "bag":
        return nn.EmbeddingBag(11, 3, sparse=True, padding_idx=2, _weight=first)
    return nn.Embedding(11, 3, sparse=True, padding_idx=2, _weight=first)


KINDS = ("table", "embedding", "bag")
AHEAD = ("next", "another batch", "own step", "twice")


@pytest.mark.parametrize(
    ("kind", "ahead", "workers"), sample([*itertools.product(KINDS, AHEAD, (1, 2))], every=5)
)
def test_what_is_prefetched_changes_no_value(kind: str, ahead: str, workers: int) -> None:
    def body(module: nn.Module, group: Group) -> None:
        for step in range(8):
            x, following, other = (
                (torch.arange(first, first + 4) % 11).unsqueeze(0)
                for first in (3 * step, 3 * step + 3, step)
            )
            if ahead == "own step":
                group.prefetch(module, x)
            for number in range(2):
                (module(x) - number).square().sum().backward()
                if number and ahead in ("next", "twice"):
                    group.prefetch(module, following)
                if ahead == "another batch":
                    group.prefetch(module, other)
                if ahead == "twice":
                    group.prefetch(module, following)
            group.step()
        found.append(values_of(module))

    def values_of(module: nn.Module) -> Tensor:
        with torch.no_grad():
            rows: Tensor = module(torch.arange(11).unsqueeze(1))
        return rows

    found: list[Tensor] = []
    for prefetches in (ahead, "never"):
        ahead = prefetches
        together(workers, lambda _: small(kind), SGD, body, options=DistributeOptions(passes=2))
    assert all(torch.equal(rows, found[0]) for rows in found)


@pytest.mark.parametrize("kind", ["table", "embedding", "bag"])
def test_a_forward_pass_takes_the_rows_that_were_prefetched(kind: str) -> None:
    def body(module: nn.Module, group: Group) -> None:
        for step in range(5):
            module(torch.tensor([[step, 2, 2]])).sum().backward()
            group.prefetch(module, torch.tensor([[step + 1, 2, 2]]))
            group.step()
        tables = group._loop.exchanged.tables.links[0]._tables
        assert isinstance(tables, AloneRowTables)
        assert tables._number == 6  # requests: the first batch, and each that follows

    together(1, lambda _: small(kind), SGD, body)


@pytest.mark.parametrize("sparse", [True, False])
def test_at_staleness_s_all_workers_end_with_the_same_rows(sparse: bool) -> None:
    found: list[Tensor] = []

    def body(module: nn.Module, group: Group) -> None:
        loop(range(20))(module, group)
        group.settle()
        found.append(values(module.embedding))  # type: ignore[arg-type]

    together(
        WORKERS,
        lambda _: Net(torch_embedding() if sparse else table()),
        SGD,
        body,
        member=member(staleness=2),
    )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_resumed_run_has_the_same_bits(sparse: bool, workers: int, tmp_path: Path) -> None:
    found: list[Tensor] = []

    def build(_: int) -> nn.Module:
        return Net(torch_embedding() if sparse else table())

    def first(module: nn.Module, group: Group) -> None:
        loop(range(7))(module, group)
        group.save(tmp_path / "run")
        loop(range(7, 12))(module, group)
        group.save(tmp_path / "run", keep=1)
        loop(range(12, 15))(module, group)
        group.settle()
        found.append(values(module.embedding))  # type: ignore[arg-type]

    def second(module: nn.Module, group: Group) -> None:
        assert group.resume(tmp_path / "run")
        loop(range(group.steps, 15))(module, group)
        group.settle()
        found.append(values(module.embedding))  # type: ignore[arg-type]

    together(workers, build, ADAM, first)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".running"}
    assert names == {f"run_iter_12.pt{ending}" for ending in ("", ".rows0", ".sha256")}
    together(workers, build, ADAM, second, shards=3)
    for rows in found:
        assert torch.equal(rows, found[0])


@pytest.mark.parametrize("sparse", [True, False])
def test_a_batch_without_weight_touches_no_row(sparse: bool) -> None:
    """Adam would move a row whose gradient is zero, and one process has no such row."""

    def body(module: nn.Module, group: Group) -> None:
        for step, records in enumerate([1, 0, 1]):
            x = torch.tensor([[3, 4, 5]]) if group.rank or step != 1 else torch.tensor([[7, 8, 9]])
            loss = nn.functional.mse_loss(module(x), torch.ones(1, 2))
            group.weigh(loss, 1 if group.rank else records).backward()
            group.step()
        group.settle()
        found.append(values(module.embedding))  # type: ignore[arg-type]

    found: list[Tensor] = []
    together(2, lambda _: Net(torch_embedding() if sparse else table()), ADAM, body)
    assert torch.equal(found[0], found[1])
    moved = (found[0] != torch_embedding().weight.detach()).any(1)
    assert moved.nonzero().flatten().tolist() == [3, 4, 5]


MOMENTUM = poseidon.SGD(lr=0.1, momentum=0.9)
DECAY = poseidon.Adam(lr=0.1, weight_decay=0.1)
REFUSED = {
    "clip": (SGD, DistributeOptions(clip=1.0), {}, "leave out clip="),
    "local steps": (SGD, DistributeOptions(local_steps=4), {}, "leave out --local_steps"),
    "all-reduce": (SGD, DistributeOptions(), {"kind": ExchangeKind.ALLREDUCE}, "use --exchange=ps"),
    "momentum": (MOMENTUM, DistributeOptions(), {}, "use SGD without momentum"),
    "decay": (DECAY, DistributeOptions(), {}, "without weight decay"),
    "no rule": (one_optimizer, DistributeOptions(), {}, "write Table\\(..., rule=poseidon.Adam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tables_cannot_be_combined_with(case: str) -> None:
    how, options, exchange, reason = REFUSED[case]
    with pytest.raises(UsageError, match=f"table 'embedding'.*{reason}"):
        together(
            2,
            lambda _: Net(table()),
            how,
            lambda *_: None,
            options=options,
            member=member(**exchange),  # type: ignore[arg-type]
        )


def misuse_of(act: Callable[[nn.Module, Group], object], how: object = SGD) -> str:
    with pytest.raises(UsageError) as caught:
        together(1, lambda _: Net(table(ADAM)), how, act)  # type: ignore[arg-type]
    return str(caught.value)


def test_what_a_group_with_tables_refuses() -> None:
    assert "save() and resume()" in misuse_of(lambda _, group: group.state_dict())

    def average(module: nn.Module, group: Group) -> None:
        module(batch(0)[0]).sum().backward()
        group.average_gradients()  # type: ignore[attr-defined]

    assert "call step() right after backward()" in misuse_of(average, one_optimizer)
    found = misuse_of(lambda net, group: group.prefetch(net.last, torch.tensor([1])))  # type: ignore[arg-type]
    assert "given Linear, which has no rows on the shards; expected a poseidon.Table" in found


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.AdamW, "torch.optim.AdamW cannot apply; use SparseAdam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), "torch.optim.SGD with momentum=0.5"),
    ],
)
def test_an_optimizer_that_moves_rows_without_a_gradient(
    optimizer: Callable[[object], torch.optim.Optimizer], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"table 'embedding.weight' has sparse.*{reason}"):
        together(
            1,
            lambda _: Net(torch_embedding()),
            lambda m: optimizer(m.parameters()),
            lambda *_: None,
        )


def test_a_sparse_embedding_that_cannot_be_a_table() -> None:
    embedding = torch_embedding()
    embedding.max_norm = 1.0
    with pytest.raises(UsageError, match=r"'embedding.weight' is sparse and its module"):
        together(1, lambda _: Net(embedding), SGD, lambda *_: None)


READS: dict[str, Callable[[nn.Embedding], Tensor]] = {
    "data": lambda embedding: embedding.weight.data.clone(),
    "a copy": lambda embedding: copy.deepcopy(embedding).weight.detach(),
    "another use": lambda embedding: nn.functional.embedding(
        torch.arange(ROWS), embedding.weight.detach()
    ),
    "a file": lambda embedding: pickle.loads(pickle.dumps(embedding.weight)).detach(),
    "state_dict": lambda embedding: embedding.state_dict()["weight"].clone(),
    "parameters": lambda embedding: (
        parameters_to_vector(embedding.parameters()).detach().view(ROWS, DIM)
    ),
}


@pytest.mark.parametrize("how", [SGD, lambda net: torch.optim.SGD(net.parameters(), lr=0.1)])
@pytest.mark.parametrize("workers", [1, WORKERS])
def test_a_read_of_a_sparse_embedding_sees_all_rows_after_the_step(workers: int, how: How) -> None:
    """Of the rows that this worker has not looked up, too, before the step's next forward pass."""

    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, Net)
        assert isinstance(module.embedding, nn.Embedding)
        for step, read in enumerate(READS.values()):
            loop(range(step, step + 1))(module, group)
            seen.setdefault(step, []).append(read(module.embedding))
            assert type(module.embedding.weight) is nn.Parameter

    seen: dict[int, list[Tensor]] = {}
    together(workers, lambda _: Net(torch_embedding()), how, body)
    weight = torch_embedding()
    net = Net(weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, found in seen.items():
        x, y = batch(step)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rows in found:
            torch.testing.assert_close(rows, weight.weight.detach(), rtol=0, atol=1e-6)
    assert len(seen) == len(READS)


def test_a_loop_that_reads_no_weight_brings_the_rows_of_its_batches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pulled: list[int] = []
    pull = EmbeddingRows.pull

    def noted(link: EmbeddingRows, rows: RowIds) -> Array:
        pulled.append(len(rows))
        return pull(link, rows)

    monkeypatch.setattr(EmbeddingRows, "pull", noted)

    def body(module: nn.Module, group: Group) -> None:
        for _ in range(3):
            module(torch.tensor([1, 2])).sum().backward()
            group.step()
            with torch.no_grad():
                module(torch.tensor([3]))
        del pulled[6:]

    together(1, lambda _: torch_embedding(), SGD, body)
    assert pulled[:6] == [2, 1] * 3


def test_a_view_of_a_sparse_embedding_has_the_rows_after_the_step() -> None:
    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(module, nn.Embedding)
        view = module.weight.detach()
        for _ in range(3):
            module(torch.tensor([group.rank])).sum().backward()
            group.step()
            seen.append(view.clone())
            assert torch.equal(view, module.weight)

    seen: list[Tensor] = []
    together(2, lambda _: nn.Embedding(2, 1, sparse=True, _weight=torch.zeros(2, 1)), SGD, body)
    expected = [[-0.05 * step] * 2 for step in (1, 1, 2, 2, 3, 3)]
    torch.testing.assert_close(
        sorted((rows.flatten().tolist() for rows in seen), reverse=True), expected
    )


def test_a_write_to_a_sparse_embedding_is_refused() -> None:
    def body(module: nn.Module, group: Group) -> None:
        module(torch.tensor([1])).sum().backward()
        group.step()
        with torch.no_grad():
            module.weight[2] = 0  # type: ignore[operator]
        module(torch.tensor([1]))

    with pytest.raises(UsageError, match=r"'weight' was changed by the script after distribute"):
        together(1, lambda _: torch_embedding(), SGD, body)


SPEC = RowTableSpec(
    name="users", rows=9, dim=2, rule=RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD), seed=3
)


def pieces() -> list[tuple[RowIds, list[Array]]]:
    random = np.random.default_rng(0)
    return [
        (
            np.array(rows, np.uint32),
            [random.random((len(rows), width)).astype(np.float32) for width in (2, 1)],
        )
        for rows in ([1, 8], [0, 3, 5])
    ]


def test_rows_come_back_to_the_bit(tmp_path: Path) -> None:
    path = rows_path(tmp_path / "run_iter_4.pt", 0)
    write_rows(path, SPEC, 4, pieces())
    assert [each.name for each in tmp_path.iterdir()] == ["run_iter_4.pt.rows0"]
    found = list(read_rows(path, SPEC, 4))
    for (rows, arrays), (written, values) in zip(found, pieces(), strict=True):
        assert rows.tobytes() == written.tobytes()
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in values]


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(path, SPEC, 4, pieces())
    whole = path.read_bytes()
    body = whole.index(b"\n") + 1
    with pytest.raises(SnapshotError, match=r'has a different table.*"updates": 5'):
        list(read_rows(path, SPEC, 5))
    for cut in (body, body + 10, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(SnapshotError, match="is truncated"):
            list(read_rows(path, SPEC, 4))
    for changed, reason in [
        (b"no header\n", "a different table: no header"),
        (whole[:body] + b"\xff" * 8, "a piece of"),
        (whole[: body + 8] + b"\x09\0\0\0" + whole[body + 12 :], "out of order"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(SnapshotError, match=reason):
            list(read_rows(path, SPEC, 4))
    path.unlink()
    with pytest.raises(SnapshotError, match=r"cannot read .*rows: No such file"):
        list(read_rows(path, SPEC, 4))
    with pytest.raises(SnapshotError, match=r"cannot write .*: No such file"):
        write_rows(tmp_path / "no" / "rows", SPEC, 4, pieces())
