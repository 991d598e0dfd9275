"""The training loops of README and docs, as printed: they train to the weights of a plain loop of
torch in one process, with a rule and with a torch.optim optimizer.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from poseidon.engine import this_process
from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import Loops, WorkerContext
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.group import Group
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S, job_addresses
from tests.support.module_groups import worker_contexts
from tests.support.page_runner import PROGRAM
from tests.support.samplers import sampler_of
from tests.support.thread_streams import streams_of_threads

PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BATCH = 32
LOOPS = [
    ("README.md", 0, 1),
    ("README.md", 0, 2),
    ("docs/torch_modules.md", 0, 1),
    ("docs/torch_modules.md", 0, 2),
    ("docs/torch_details.md", 0, 1),  # torch.compile is not for several threads of one process
    ("docs/torch_resume.md", 0, 1),
    ("docs/torch_resume.md", 0, 2),
]
"""Every loop of the pages with the model of `PROGRAM`: page, place on it, workers."""
TABLES = ("docs/tables.md", 0)
"""The loop with a table."""
OF_NOTEBOOK = ("docs/notebooks.md", 0)
"""A loop that starts its workers itself; `tests/distributed/test_notebooks.py` runs it."""
OF_SHARDS = {("docs/large_modules.md", 0), ("docs/large_modules.md", 1)}
"""Loops with modules that are divided, as `tests/distributed/test_large_modules.py` trains them."""
VIRTUAL = ("docs/torch_modules.md", 2)
"""The loop with virtual workers."""
PART = ("docs/torch_modules.md", 1)
"""A loop without what comes before it."""
SHORTER = (("sampler.epoch, 90)", "sampler.epoch, 3)"), ("(optimizer, 30)", "(optimizer, 2)"))
"""Numbers of the pages that are large: epochs, and those between two falls of the rate."""
LOOP_OF_DDP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(dataset, batch_size=32, sampler=group.sampler(dataset))
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step(); optimizer.zero_grad()
"""


class ProcessOfEachThread(threading.local):
    """Stands for `Process`: each thread is a process of its own."""

    context: WorkerContext | None = None

    def __init__(self) -> None:
        self.loops = Loops()
        self.opened: list[Group] = []


def loops_of(page: Path) -> list[str]:
    blocks = PYTHON_BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in blocks if "group.step(" in block]


def shorter(loop: str) -> str:
    for large, small in SHORTER:
        loop = loop.replace(large, small)
    return loop


def by_rule(loop: str) -> str:
    """Return a loop with rules of the shards; what needs a torch optimizer is left out."""
    lines = [line for line in loop.splitlines() if "scheduler" not in line]
    return re.sub(r"torch\.optim\.SGD\(model\.parameters\(\), ", "poseidon.SGD(", "\n".join(lines))


def by_optimizer(loop: str) -> str:
    return loop.replace("poseidon.SGD(", "torch.optim.SGD(model.parameters(), ")


def program() -> dict[str, Any]:
    """Return the names that a page's loop uses. `build_model` gives the same weights each time."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        exec(compile(PROGRAM, "program", "exec"), names)
        first = names["build_model"]()
    return {**names, "build_model": lambda: copy.deepcopy(first)}


def trained_on(
    workers: int, code: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> list[dict[str, Tensor]]:
    """Run a program on a thread per worker. Return the weights of each."""
    monkeypatch.setattr(this_process, "PROCESS", ProcessOfEachThread())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.chdir(folder)
    before = program()
    ends: list[dict[str, Tensor]] = []
    member = Membership(
        network=Network(timeout_s=TIMEOUT_S), options=ExchangeOptions(kind=ExchangeKind.SERVER)
    )

    def run(context: WorkerContext) -> None:
        names = dict(before)
        with running_in(context):
            exec(compile(code, "page", "exec"), names)
            ends.append(copy.deepcopy(names["model"].state_dict()))

    with ExitStack() as stack:
        contexts = [WorkerContext()]
        if workers > 1:
            connect = stack.enter_context(job_addresses(ExchangeKind.SERVER, workers, 1))
            contexts = worker_contexts(workers, connect, member, shards=1, folder=folder)
        threads = [threading.Thread(target=run, args=(context,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ends) == workers
    return ends


def trained_plainly(
    workers: int, *, epochs: int = 1, momentum: float = 0.0, falls: float = 1.0
) -> dict[str, Tensor]:
    """Return the weights of one process without Poseidon, with the batches of all workers."""
    names = program()
    model: nn.Module = names["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    scheduler = StepLR(optimizer, 2, falls)
    sampler = sampler_of(names["dataset"], own=range(1), workers=1)
    loader = DataLoader(names["dataset"], batch_size=workers * BATCH, sampler=sampler)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            names["criterion"](model(x), y).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict()


def assert_close(ends: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for end in ends:
        for name, value in end.items():
            plain = name.removeprefix("_orig_mod.")
            torch.testing.assert_close(value, expected[plain], rtol=1e-4, atol=1e-5, msg=name)


def test_every_loop_of_the_pages_is_among_these(repository: Path) -> None:
    found = set()
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md"):
        for page in repository.glob(pattern):
            name = str(page.relative_to(repository))
            found |= {(name, at) for at, _ in enumerate(loops_of(page))}
    others = {TABLES, PART, VIRTUAL, OF_NOTEBOOK, *OF_SHARDS}
    assert found == others | {(page, at) for page, at, _ in LOOPS}


@pytest.mark.parametrize("kind", [by_rule, by_optimizer])
@pytest.mark.parametrize(("page", "at", "workers"), LOOPS)
def test_a_loop_as_printed_trains_as_one_process(
    page: str,
    at: int,
    workers: int,
    kind: Callable[[str], str],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = kind(shorter(loops_of(repository / page)[at]))
    ends = trained_on(workers, loop, monkeypatch, tmp_path)
    epochs = 3 if "epoch" in loop else 1
    momentum = 0.9 if "momentum" in loop else 0.0
    falls = 0.1 if "scheduler" in loop else 1.0
    assert_close(ends, trained_plainly(workers, epochs=epochs, momentum=momentum, falls=falls))


def test_the_loop_with_virtual_workers_has_the_same_bits_on_any_number_of_workers(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = shorter(loops_of(repository / VIRTUAL[0])[VIRTUAL[1]])
    loop = loop.replace("virtual_workers=8", "virtual_workers=3").replace("=32", "=16")
    ends = []
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        with streams_of_threads():
            ends += trained_on(workers, loop, monkeypatch, tmp_path / str(workers))
    for end in ends[1:]:
        assert all(torch.equal(value, end[name]) for name, value in ends[0].items())


def test_the_loop_with_a_table_learns(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    items = torch.arange(12).reshape(6, 2) * 800_000
    losses: list[float] = []

    class Noted(nn.Module):
        def forward(self, found: Tensor, label: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(found, label)
            losses.append(loss.item())
            return loss

    loop = loops_of(repository / TABLES[0])[TABLES[1]]
    loop = loop.replace("nn.functional.mse_loss(", "noted(")
    names = {"loader": [(items, torch.ones(6, 1))] * 60, "noted": Noted()}
    exec(compile(loop, "page", "exec"), names)
    assert losses[-1] < 0.8 * losses[0]
    names["group"].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_of_ddp_changed_as_the_page_says_trains_as_before(
    workers: int, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (repository / "docs" / "from_ddp.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)`", page, re.MULTILINE))
    step = "optimizer.step(); optimizer.zero_grad()"
    loop = LOOP_OF_DDP.replace(step, rows[step])
    assert "zero_grad" not in loop
    head, body = loop.split("loader", 1)
    group = "group = poseidon.distribute(model, optimizer)\n"
    code = f"model = build_model()\n{head}{group}loader{body}group.close()\n"
    ends = trained_on(workers, code, monkeypatch, tmp_path)
    assert_close(ends, trained_plainly(workers))
