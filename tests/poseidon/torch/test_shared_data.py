"""The batches of a worker's loader, in turn for its virtual workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from poseidon.engine.random_streams import RandomStreams
from poseidon.errors import UsageError
from poseidon.torch.group import Group
from poseidon.torch.sampler import SharedSampler
from poseidon.torch.shared_data import SharedLoader
from poseidon.torch.update_rules import SGD
from poseidon.torch.weights import BatchWeights
from tests.support.module_groups import together
from tests.support.samplers import sampler_of


def loader_of(
    data: TensorDataset,
    sampler: SharedSampler,
    batch_size: int,
    *,
    passes: int = 1,
    streams: RandomStreams | None = None,
    **arguments: Any,
) -> SharedLoader:
    """Return a loader without a group."""
    loop: Any = SimpleNamespace(
        update=SimpleNamespace(
            plan=SimpleNamespace(options=SimpleNamespace(passes=passes)),
        ),
        weights=BatchWeights(workers=5),
        streams=streams or RandomStreams(sampler.own, None, torch.device("cpu"), divided=False),
        session=SimpleNamespace(left_out=0),
    )
    return SharedLoader(data, sampler, batch_size, loop, lambda: None, **arguments)


def test_the_last_batch_is_within_its_epoch_until_the_loop_ends() -> None:
    records = TensorDataset(torch.arange(5))
    for arguments in ({}, {"drop_last": True}):
        sampler = sampler_of(records, own=range(1), workers=1, shuffle=False)
        loader = loader_of(records, sampler, 2, **arguments)
        places = [(loader.position, sampler.state_dict()["epoch"]) for _ in loader]
        assert places == [(batch, 0) for batch in range(1, len(loader) + 1)]
        assert (loader.position, sampler.state_dict()["epoch"]) == (0, 1)


@pytest.mark.parametrize(
    ("batch_size", "arguments", "sentence"),
    [
        (2, {"sampler": [0]}, "makes its own sampler; for sampler= use"),
        (2, {"batch_sampler": [[0]]}, "makes its own sampler; for batch_sampler= use"),
        (None, {}, "batch_size=None; expected a whole number, 1 or more"),
        (0, {}, "batch_size=0; expected"),
        (2.5, {"even": False}, "batch_size=2.5; expected"),
    ],
)
def test_what_a_loader_cannot_have(
    batch_size: Any, arguments: dict[str, Any], sentence: str
) -> None:
    def body(module: nn.Module, group: Group) -> None:
        group.loader(TensorDataset(torch.arange(4)), batch_size, **arguments)

    with pytest.raises(UsageError, match=sentence):
        together(1, lambda _: nn.Linear(1, 1), SGD(lr=1), body)


def read_in_turn(own: range, passes: int, records: int, **arguments: Any) -> list[list[int]]:
    """Return the records of each batch of 5 virtual workers' loader, two epochs."""
    data = TensorDataset(torch.arange(records))
    unfilled = 2 if arguments.pop("uneven", False) else 0
    sampler = sampler_of(data, own=own, workers=5, unfilled=unfilled)
    loader = loader_of(data, sampler, 2, passes=passes, **arguments)
    found = [batch.tolist() for _ in range(2) for (batch,) in loader]
    assert len(found) == 2 * len(loader)
    return found


@pytest.mark.parametrize(
    ("passes", "records", "arguments"),
    [
        (1, 33, {}),
        (1, 33, {"uneven": True}),
        (1, 33, {"drop_last": True}),
        (2, 40, {}),
        (2, 40, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_a_process_reads_the_batches_of_its_virtual_workers_in_turn(
    passes: int, records: int, arguments: dict[str, Any]
) -> None:
    alone = [read_in_turn(range(v, v + 1), passes, records, **arguments) for v in range(5)]
    for own in (range(5), range(1, 4)):
        read = read_in_turn(own, passes, records, **arguments)
        expected = [
            batch
            for start in range(0, len(alone[0]), passes)
            for v in own
            for batch in alone[v][start : start + passes]
        ]
        assert read == expected


def test_a_process_resumes_all_of_its_virtual_workers() -> None:
    data = TensorDataset(torch.arange(30))
    samplers = [sampler_of(data, own=range(2), workers=3) for _ in range(2)]
    first, second = (loader_of(data, sampler, 2) for sampler in samplers)
    whole = [batch.tolist() for (batch,) in first]
    epoch = iter(second)
    for _ in range(4):
        next(epoch)
    assert second.position == 4
    again = sampler_of(data, own=range(1, 3), workers=3)
    again.load_state_dict(samplers[1].state_dict())
    rest = [batch.tolist() for (batch,) in loader_of(data, again, 2)]
    assert rest[::2] == whole[5::2]


def test_passes_are_whole_steps_of_several_virtual_workers() -> None:
    data = TensorDataset(torch.arange(12))
    loader = loader_of(data, sampler_of(data, own=range(2), workers=2), 2, passes=2)
    with pytest.raises(UsageError, match="each virtual worker has 3 batches in this epoch, which "):
        next(iter(loader))


class Noise(TensorDataset):
    """Records with a number that is drawn."""

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return torch.rand(()).item()


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("own_generator", [False, True])
def test_loader_processes_draw_numbers_of_each_virtual_worker(
    own_generator: bool, is_told: bool
) -> None:
    """Scripts give all workers the same seeds, also of a generator of their own."""

    def drawn(own: range) -> list[list[float]]:
        torch.manual_seed(3)
        arguments = {"generator": torch.Generator().manual_seed(5)} if own_generator else {}
        streams = RandomStreams(own, 7 if is_told else None, torch.device("cpu"))
        data = Noise(torch.arange(8))
        sampler = sampler_of(data, own=own, workers=2)
        loader = loader_of(data, sampler, 4, streams=streams, num_workers=1, **arguments)
        try:
            return [batch.tolist() for _ in range(2) for batch in loader]
        finally:
            streams.enter(None)

    before = torch.get_rng_state()
    first, second, both = drawn(range(1)), drawn(range(1, 2)), drawn(range(2))
    torch.set_rng_state(before)
    assert both == [first[0], second[0], first[1], second[1]]
    assert len({number for batch in both for number in batch}) == 16
