"""Streams of records without numbers: torchdata's StatefulDataLoader, WebDataset, and Hugging
Face's datasets.
"""

from __future__ import annotations

import copy
import itertools
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from poseidon.torch.group import Group
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import Body, assert_same, together

stateful = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is of the extra dev-all"
)
webdataset = pytest.importorskip("webdataset", reason="webdataset is of the extra dev-all")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
RATE, WORKERS = 0.1, 2


def build(rank: int) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


class Stream(IterableDataset[Tensor]):
    """Worker g has the numbers from 10 g + 1 on: 5 of them on worker 0, 8 on worker 1."""

    def __init__(self, rank: int) -> None:
        self.first, self.count, self.at = 10.0 * rank, 5 + 3 * rank, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.first + self.at])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(module: nn.Module, group: Group, x: Tensor) -> None:
    group.weigh(module(x).mean(), len(x)).backward()
    group.step()


def over_stream(state: list[dict[str, Any]], *, resumes: bool, processes: int) -> Body:
    """Return a loop over both epochs of each worker's stream; the state is taken in step 2."""

    def run(module: nn.Module, group: Group) -> None:
        loader = stateful.StatefulDataLoader(
            Stream(group.rank), batch_size=2, num_workers=processes
        )
        group.keep_own(loader=loader)
        if resumes:
            group.load_state_dict(state[0] if group.rank == 0 else None)
        while group.steps < 8:
            for x in group.epoch(loader):
                train(module, group, x)
                if group.steps == 2 and not resumes:
                    found = group.state_dict()
                    state.extend([copy.deepcopy(found)] * (group.rank == 0))

    return run


def test_a_stateful_loader_goes_on_where_each_worker_was() -> None:
    state: list[dict[str, Any]] = []
    rule = SGD(lr=RATE)
    (whole, _) = together(WORKERS, build, rule, over_stream(state, resumes=False, processes=0))
    streams = ([1, 2], [3, 4], [5]), ([11, 12], [13, 14], [15, 16], [17, 18])
    steps = [[*pair[0], *pair[1]] for pair in itertools.zip_longest(*streams, fillvalue=[])]
    expected = -RATE * 2 * sum(sum(step) / len(step) for step in steps)
    assert float(whole["weight"]) == pytest.approx(expected, rel=1e-6)
    ends = together(WORKERS, build, rule, over_stream(state, resumes=True, processes=0))
    assert_same(ends, whole, rtol=0)


# webdataset leaves the file of a shard open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_worker_reads_its_own_shards_of_a_web_dataset(tmp_path: Path) -> None:
    for shard, numbers in enumerate(([1, 2, 3], [10, 20], [4])):
        with tarfile.open(tmp_path / f"records-{shard}.tar", "w") as archive:
            for number in numbers:
                content = str(float(number)).encode()
                entry = tarfile.TarInfo(f"{number:03}.txt")
                entry.size = len(content)
                archive.addfile(entry, BytesIO(content))

    def run(module: nn.Module, group: Group) -> None:
        records = webdataset.WebDataset(
            str(tmp_path / "records-{0..2}.tar"),
            shardshuffle=False,
            nodesplitter=lambda shards: itertools.islice(shards, group.rank, None, group.size),
        )
        numbers = records.decode().map(lambda record: torch.tensor([float(record["txt"])]))
        for x in group.epoch(torch.utils.data.DataLoader(numbers, batch_size=2)):
            train(module, group, x)

    (end, _) = together(WORKERS, build, SGD(lr=RATE), run)
    expected = -RATE * ((1 + 2 + 10 + 20) / 4 + (3 + 4) / 2)
    assert float(end["weight"]) == pytest.approx(expected, rel=1e-6)


def test_the_streams_of_hugging_face_are_divided_and_resumed() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is of the extra dev-all")
    from datasets.distributed import split_dataset_by_node

    states: list[dict[str, Any]] = []

    def run(module: nn.Module, group: Group) -> None:
        numbers = datasets.Dataset.from_dict({"x": [[float(n)] for n in range(11)]})
        stream = numbers.with_format("torch").to_iterable_dataset()
        own = split_dataset_by_node(stream, rank=group.rank, world_size=group.size)
        loader = stateful.StatefulDataLoader(own, batch_size=2)
        group.keep_own(loader=loader)
        resumes = bool(states)  # the first run adds them after a step of both workers
        if resumes:
            group.load_state_dict(states[0] if group.rank == 0 else None)
        for batch in group.epoch(loader):
            train(module, group, batch["x"])
            if group.steps == 1 and not resumes:
                found = group.state_dict()
                states.extend([copy.deepcopy(found)] * (group.rank == 0))

    for _ in range(2):
        (end, _) = together(WORKERS, build, SGD(lr=RATE), run)
        # worker 0 has 0, 2, ..., 10 and worker 1 has 1, 3, ..., 9
        steps = [0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9]
        expected = -RATE * sum(sum(step) / len(step) for step in steps)
        assert float(end["weight"]) == pytest.approx(expected, rel=1e-6)


def test_a_dataset_of_hugging_face_has_records_by_number() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is of the extra dev-all")

    def run(module: nn.Module, group: Group) -> None:
        numbers = datasets.Dataset.from_dict({"x": [[float(n)] for n in range(10)]})
        loader = group.loader(numbers.with_format("torch"), 2, shuffle=False, even=False)
        for batch in loader:
            group.weigh(module(batch["x"]).mean()).backward()
            group.step()

    (end, _) = together(WORKERS, build, SGD(lr=RATE), run)
    steps = [0, 2, 1, 3], [4, 6, 5, 7], [8, 9]
    expected = -RATE * sum(sum(step) / len(step) for step in steps)
    assert float(end["weight"]) == pytest.approx(expected, rel=1e-6)
