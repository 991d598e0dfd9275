"""Any torch module on several workers: one process with the whole batch gets the same weights."""

from __future__ import annotations

import copy
import itertools
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import JobError, UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, OnDivergence
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import Buffers, DistributeOptions, RunsOn
from poseidon.torch.update_rules import SGD, ParameterGroup
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import (
    BATCH,
    BUILDING,
    OPTIMIZERS,
    RULES,
    STEPS,
    How,
    Normed,
    RecordingJob,
    a_step,
    assert_same,
    batches,
    build,
    example,
    failures_of,
    loop,
    member,
    never,
    of_batches,
    together,
)
from tests.support.sampling import sample

KINDS = [kind for kind in ExchangeKind if kind is not ExchangeKind.LOCAL]


@pytest.mark.parametrize(
    ("name", "kind"), sample([*itertools.product([*RULES, *OPTIMIZERS], KINDS)], every=3)
)
def test_two_workers_are_one_process(name: str, kind: ExchangeKind) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    (expected,) = together(1, build, how, loop())
    ends = together(
        2, build, how, loop(), options=DistributeOptions(example=example()), member=member(kind)
    )
    assert_same(ends, expected)


@pytest.mark.parametrize("name", ["sgd", "torch sgd"])
def test_several_passes_and_a_limit_of_the_norm(name: str) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    limited = DistributeOptions(passes=2, clip=0.05, example=example())
    (expected,) = together(1, build, how, loop(passes=2), options=limited)
    (unlimited,) = together(1, build, how, loop(passes=2), options=DistributeOptions(passes=2))
    ends = together(3, build, how, loop(passes=2), options=limited, member=member())
    assert_same(ends, expected)
    assert not torch.allclose(expected["last.weight"], unlimited["last.weight"], atol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_alone_is_the_optimizer_without_us(name: str) -> None:
    (end,) = together(1, build, OPTIMIZERS[name], loop())
    module = build(0)
    optimizer = OPTIMIZERS[name](module)
    for step in batches():
        optimizer.zero_grad()
        for x, y in step:
            nn.functional.mse_loss(module(x), y).backward()
        for parameter in module.parameters():  # what is used nowhere counts as zero
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(end[name], value), name


def test_the_optimizers_own_step_is_enough() -> None:
    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        optimizer = group._update.optimizer
        for ((x, y),) in batches():
            own = slice(group.rank, None, group.size)
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x[own]), y[own]).backward()
            optimizer.step()
        assert group.steps == STEPS

    (expected,) = together(1, build, OPTIMIZERS["torch sgd"], loop())
    assert_same(together(2, build, OPTIMIZERS["torch sgd"], body, member=member()), expected)


class Tied(nn.Module):
    """A layer whose weight is used a second time without it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(15, 40)
        self.square = nn.Linear(40, 40)
        self.last = nn.Linear(40, 4)

    def forward(self, x_NCT: Tensor) -> Tensor:
        x = torch.tanh(self.square(torch.tanh(self.wide(x_NCT.flatten(1)))))
        result: Tensor = self.last(torch.tanh(nn.functional.linear(x, self.square.weight)))
        return result


def build_tied(_: int) -> Tied:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return Tied()


@pytest.mark.parametrize("name", ["sgd", "torch sgd"])
@pytest.mark.parametrize(
    "options",
    [DistributeOptions(example=example()), DistributeOptions(batch_size=BATCH // 2)],
    ids=["travels whole", "travels as factors and more rows"],
)
def test_a_weight_may_be_used_beside_its_layer(name: str, options: DistributeOptions) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    (expected,) = together(1, build_tied, how, loop())
    job = member(ExchangeKind.FACTORS)
    assert_same(together(2, build_tied, how, loop(), options=options, member=job), expected)


@pytest.mark.parametrize("mends", [False, True])
def test_a_worker_whose_optimizer_drifts_is_found(mends: bool) -> None:
    """After step 3 the momentum of one worker changes by itself; the workers compare after every
    second step.
    """
    member = Membership(
        network=Network(timeout_s=TIMEOUT_S),
        options=ExchangeOptions(
            check_replicas=2, on_divergence=OnDivergence.MEND if mends else OnDivergence.STOP
        ),
    )
    optimizers: dict[nn.Module, torch.optim.Optimizer] = {}

    def how(net: nn.Module) -> torch.optim.Optimizer:
        optimizers[net] = OPTIMIZERS["torch sgd"](net)
        return optimizers[net]

    def body(module: nn.Module, group: Group) -> None:
        def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if group.rank == 1 and group.steps == 3:
                next(iter(optimizer.state.values()))["momentum_buffer"].view(-1)[0] += 1

        optimizers[module].register_step_post_hook(spoil)
        loop()(module, group)

    if mends:
        first, second = together(2, build, how, body, member=member)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    else:
        with pytest.raises(JobError, match=r"momentum_buffer.* on worker 1 .* 4 .equal"):
            together(2, build, how, body, member=member)


@pytest.mark.parametrize("checks", [True, False])
def test_weights_that_one_worker_has_read_by_itself_are_found_after_the_first_step(
    checks: bool,
) -> None:
    def body(module: nn.Module, group: Group) -> None:
        if group.rank == 1:
            module.load_state_dict(build(7).state_dict())
        loop()(module, group)

    options = ExchangeOptions() if checks else ExchangeOptions(check_replicas=0)
    job = Membership(network=Network(timeout_s=TIMEOUT_S), options=options)
    if not checks:
        assert len(together(2, build, OPTIMIZERS["torch sgd"], body, member=job)) == 2
        return
    with pytest.raises(JobError, match=r"on worker 1 .* after iteration 1 .*before distribute\(\)"):
        together(2, build, OPTIMIZERS["torch sgd"], body, member=job)


@pytest.mark.parametrize(
    ("how", "rounds"), [(SGD(lr=0.5), 0), (SGD(lr=0.5), 3), (OPTIMIZERS["torch sgd"], 3)]
)
def test_a_forward_pass_may_follow_the_last_step(how: How, rounds: int) -> None:
    ends: dict[tuple[int, bool], Tensor] = {}

    def run(rank: int, context: WorkerContext, *, follows: bool) -> None:
        module, options = nn.Linear(3, 2), DistributeOptions(local_steps=rounds)
        nn.init.ones_(module.weight)
        own = how if isinstance(how, SGD) else how(module)
        with join(module, own, options, context) as group:
            for step in range(4):
                module(torch.full((1, 3), 1.0 + rank + step)).sum().backward()
                group.step()
            if follows:
                module(torch.ones(1, 3))
        ends[rank, follows] = module.weight.detach().clone()

    job = member(staleness=0 if rounds else 2)
    for follows in (False, True):
        assert not failures_of(2, partial(run, follows=follows), member=job)
    for end in ends.values():  # the gradients do not depend on the values
        torch.testing.assert_close(end, ends[0, False])


def test_what_is_not_trained_begins_alike() -> None:
    first, second = together(2, build, SGD(lr=0.0), lambda module, group: None, member=member())
    for name, value in build(0).state_dict().items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize("how", [SGD(lr=0.1), OPTIMIZERS["torch sgd"]])
@pytest.mark.parametrize("buffers", Buffers)
def test_running_statistics(buffers: Buffers, how: How) -> None:
    options = DistributeOptions(buffers=buffers)
    ends = together(
        2, lambda _: Normed(), how, of_batches(a_step), options=options, member=member()
    )
    alike = torch.equal(ends[0]["1.running_mean"], ends[1]["1.running_mean"])
    assert alike == (buffers is Buffers.AVERAGE)
    assert int(ends[1]["1.num_batches_tracked"]) == STEPS
    assert torch.equal(ends[0]["0.weight"], ends[1]["0.weight"])


class Buffered(nn.Linear):
    def __init__(
        self, size: int, *, dtype: torch.dtype = torch.float32, more: bool = False
    ) -> None:
        super().__init__(3, 2)
        self.register_buffer("mask", torch.zeros(size, dtype=dtype))
        if more:
            self.register_buffer("more", torch.zeros(2))


F32 = "'{}' of torch.float32, ({},)"


@pytest.mark.parametrize(
    ("modules", "ours", "theirs"),
    [
        ((Buffered(3), Buffered(4)), F32.format("mask", 3), F32.format("mask", 4)),
        ((Buffered(3), Buffered(3, more=True)), "no more tensors", F32.format("more", 2)),
        ((Buffered(3, more=True), Buffered(3)), F32.format("more", 2), "no more"),
        (
            (Buffered(3, dtype=torch.float64), Buffered(3)),
            "'mask' of torch.float64, (3,)",
            F32.format("mask", 3),
        ),
    ],
)
def test_other_buffers_on_other_workers(
    modules: Sequence[nn.Module], ours: str, theirs: str
) -> None:
    sentence = f"worker 0's module has {ours}, where worker 1's has {theirs}"
    with pytest.raises(UsageError, match=re.escape(sentence)):
        together(2, lambda rank: copy.deepcopy(modules[rank]), SGD(lr=0.1), never, member=member())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"passes": 0}, "passes is 0"),
        ({"clip": 0.0}, "clip is 0"),
        ({"buffers": "no"}, "buffers is 'no'; expected 'average' or 'own'"),
        ({"example": (1,), "batch_size": 2}, "not both"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        poseidon.distribute(Normed(), SGD(lr=0.1), **arguments)


def test_how_is_a_rule_or_an_optimizer_of_the_module() -> None:
    with pytest.raises(UsageError, match="was given a str"):
        poseidon.distribute(Normed(), "sgd")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="was given a list as its module"):
        poseidon.distribute([nn.Linear(2, 2)], SGD(lr=0.1))  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"2 of the optimizer's 2 parameters are not the module's"):
        poseidon.distribute(Normed(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"the group 'x\.\*' matches no parameter"):
        poseidon.distribute(Normed(), SGD(lr=0.1, groups=(ParameterGroup(names="x.*"),)))


@pytest.mark.parametrize("call", ["step", "mean", "settle", "state_dict"])
@pytest.mark.parametrize("how", [SGD(lr=0.1), OPTIMIZERS["torch sgd"]])
def test_a_call_after_the_group_was_closed_is_refused(how: How, call: str) -> None:
    """Else each worker would go on by itself."""

    def body(module: nn.Module, group: Group) -> None:
        a_step(module, group, torch.ones(2, 3))
        group.settle()
        group.close()
        module(torch.ones(2, 3)).sum().backward()
        getattr(group, call)(*([1.0] if call == "mean" else []))

    with pytest.raises(
        UsageError, match=rf"{call}\(\) comes after close\(\), or after the `with` block"
    ):
        together(2, lambda _: Normed(), how, body, member=member())


def test_a_worker_reports_that_it_waits_for_others_to_join() -> None:
    job = RecordingJob()
    with join(Normed(), SGD(lr=0.1), DistributeOptions(), WorkerContext(job=job)):
        assert [one.collection for one in job.positions] == ["distribute", ""]


def test_a_script_that_a_scheduler_starts_several_times_is_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="^OMPI_COMM_WORLD_SIZE=2"):
        poseidon.distribute(Normed(), SGD(lr=0.1)).close()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"^WORLD_SIZE=2: .*start `-m poseidon worker"):
        poseidon.distribute(Normed(), SGD(lr=0.1))
    with running_in(WorkerContext()):
        poseidon.distribute(Normed(), SGD(lr=0.1))


@pytest.mark.parametrize(
    ("call", "printed"),
    [
        ("group.save(keep=-1)", "train.py, line 4: save() was given keep=-1; expected a number"),
        ("1 / 0", "Traceback (most recent call last):"),
    ],
)
def test_an_error_of_poseidon_ends_a_plain_script_with_one_sentence(
    call: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import poseidon, torch\nmodel = torch.nn.Linear(2, 1)\n"
        f"group = poseidon.distribute(model, poseidon.SGD(lr=0.1))\n{call}\n"
    )
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises((UsageError, ZeroDivisionError)) as caught:
        runpy.run_path(str(script), run_name="__main__")
    sys.excepthook(caught.type, caught.value, caught.tb)
    error = capsys.readouterr().err
    assert error.startswith(printed)
    assert ("Traceback" in error) == ("1 / 0" in call)


def test_a_wrong_argument_of_the_first_call_is_one_sentence_under_plain_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(UsageError) as caught:
        poseidon.distribute(nn.Linear(2, 1), SGD(lr=0.1), virtual_workers=0)
    sys.excepthook(caught.type, caught.value, caught.tb)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("virtual_workers is 0; expected 1 or more, or None for --virtual_workers")


ALONE = """
import poseidon, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
dataset = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
with poseidon.distribute(model, HOW) as group:
    loader = group.loader(dataset, 4)
    resumed = group.resume()
    for epoch in range(loader.sampler.epoch, EPOCHS):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            group.step()
        path = group.save()
"""


@pytest.mark.parametrize(
    "how", ["poseidon.Adam(lr=0.1)", "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"]
)
def test_a_script_alone_saves_to_a_folder_and_resumes_from_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python train.py`: nothing names a folder."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    ends: list[dict[str, Any]] = []
    for folder, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        (tmp_path / "train.py").write_text(
            ALONE.replace("HOW", how).replace("EPOCHS", str(epochs)), encoding="utf-8"
        )
        with torch.random.fork_rng():
            ends.append(runpy.run_path(str(tmp_path / "train.py")))
    whole, first, second = ends
    folder = tmp_path / "parts" / "checkpoints"
    assert [end["resumed"] for end in ends] == [False, False, True]
    saved = [end["path"].name for end in (first, second)]
    assert saved == ["train_iter_6.pt", "train_iter_12.pt"]
    for name, value in whole["model"].state_dict().items():
        assert torch.equal(value, second["model"].state_dict()[name])
    goes = f"poseidon: checkpoints go to {folder}/train_iter_<steps>.pt\n"
    resumes = f"poseidon: resuming from {folder}/train_iter_6.pt at step 6\n"
    assert capsys.readouterr().err.endswith(goes + resumes + goes)


@pytest.mark.parametrize(
    ("how", "on", "words"),
    [
        ("torch.optim.AdamW(model.parameters())", "'shards'", None),
        ("[torch.optim.AdamW(model.parameters())]", "'shards'", None),
        ("poseidon.SGD(lr=1)", "'shards'", None),
        ("torch.optim.AdamW(model.parameters())", "'server'", "on is 'server'; expected 'workers'"),
        ("poseidon.SGD(lr=1)", "'workers'", "on is 'workers' with poseidon.SGD, a rule that the"),
        ("[poseidon.SGD(lr=1)]", "'shards'", "distribute.. was given a list; expected a rule such"),
        ("[]", "'shards'", "distribute.. was given a list; expected a rule such"),
        ("[torch.optim.AdamW(model.parameters())]", "'workers'", "several of one module with on="),
    ],
)
def test_where_an_optimizer_runs(how: str, on: str, words: str | None) -> None:
    names = {"poseidon": poseidon, "torch": torch, "model": nn.Linear(2, 2)}
    call = f"poseidon.distribute(model, {how}, on={on}).close()"
    if words is None:
        exec(call, names)
        return
    with pytest.raises(UsageError, match=words):
        exec(call, names)


def embedding(rank: int) -> nn.Module:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Embedding(1000, 32)


def sgd_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("how", "on"),
    [(poseidon.SGD(lr=0.1), RunsOn.SHARDS), (sgd_of, RunsOn.SHARDS), (sgd_of, RunsOn.WORKERS)],
    ids=["a rule", "an optimizer on the shards", "an optimizer on the workers"],
)
def test_of_an_embedding_the_rows_travel_that_are_looked_up(how: How, on: RunsOn) -> None:
    """To the bit as with all rows, also where a script changes mean gradients in place, which may
    be the same in two steps.
    """
    sizes: dict[bool, list[Traffic]] = {True: [], False: []}

    def body(module: nn.Module, group: Group) -> None:
        optimizer = (
            group._update.optimizer if isinstance(group._update, WorkerOptimizerUpdate) else None
        )
        for step in range(5):
            words = torch.arange(8).view(2, 4) * (1 + group.rank) + 100 * (step // 2)
            module(words).sum().backward()
            if isinstance(group._update, WorkerOptimizerUpdate) and optimizer is not None:
                group.average_gradients()
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            else:
                group.step()
        sizes[is_packed].append(group._loop.exchanged.exchange.traffic()[0])

    found = []
    for is_packed in (True, False):
        with ExitStack() as stack:
            if not is_packed:
                none = mock.patch("poseidon.torch.tensors.looked_up", lambda _: frozenset())
                stack.enter_context(none)
            options = DistributeOptions(on=on)
            found.append(together(2, embedding, how, body, options=options))
    for own, whole in zip(*found, strict=True):
        assert all(torch.equal(own[name], whole[name]) for name in whole)
    for own_size, whole_size in zip(sizes[True], sizes[False], strict=True):
        assert own_size.bytes_out < whole_size.bytes_out / 50
        assert own_size.bytes_in < whole_size.bytes_in / 3  # the first value is whole
