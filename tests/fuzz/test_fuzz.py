"""A few hundred mutated inputs of each kind: loaded, or refused with one sentence; `python -m
tests.fuzz` runs more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from poseidon.caffe.snapshot.caffemodel import read_model
from tests.fuzz import branches, judging
from tests.fuzz.__main__ import NAMES
from tests.fuzz.branches import LAYERS
from tests.fuzz.judging import Outcome, judge
from tests.fuzz.targets import Kind, kinds, run_net

CASES = 80
SEED = 20


@pytest.fixture(autouse=True)
def _denormals_are_numbers() -> Iterator[None]:
    """Whatever a test before has set for this process."""
    flushed = torch.tensor(1e-39).mul(1).item() == 0
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(flushed)


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Made from the project's own files alone, so that the cases are the same everywhere."""
    return kinds(tmp_path_factory.mktemp("seeds"), None)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs(
    name: str, every_kind: dict[str, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, counts = every_kind[name], Counter[Outcome]()
    path = tmp_path / f"case{kind.suffix}"
    for number in range(CASES):
        path.write_bytes(kind.case(SEED, number))
        verdict = judge(kind.load, path)
        counts[verdict.outcome] += 1
        assert verdict.outcome is not Outcome.FOUND, (
            f"case {number} of seed {SEED}: {verdict.words}"
        )
    assert counts[Outcome.REFUSED] > CASES / 4, "the mutations do no harm"


def test_valid_inputs_load(every_kind: dict[str, Kind], tmp_path: Path) -> None:
    """The seeds load: a reader that refuses everything would pass the test above."""
    for name in (
        *("caffemodel", "solverstate", "hdf5", "datum", "mean"),
        *("detection", "augmentation", "annotated", "annotation"),
    ):
        for number, content in enumerate(every_kind[name].seeds):
            path = tmp_path / f"{name}{number}{every_kind[name].suffix}"
            path.write_bytes(content)
            assert judge(every_kind[name].load, path).outcome is Outcome.LOADED, path.name


def test_numbers_one_by_one_are_the_same_model(every_kind: dict[str, Kind], tmp_path: Path) -> None:
    found = []
    for content in every_kind["caffemodel"].seeds[:2]:
        (tmp_path / "m").write_bytes(content)
        found.append(
            [
                (name, [a.tobytes() for a in arrays if a is not None])
                for name, arrays in read_model(tmp_path / "m")
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("failure", (ValueError("x"), MemoryError(), RecursionError()))
def test_anything_else_is_a_finding(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "case"
    path.touch()

    def load(_: Path) -> None:
        raise failure

    verdict = judge(load, path)
    assert verdict.outcome is Outcome.FOUND and type(failure).__name__ in verdict.words


def test_memory_and_time_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "case"
    path.touch()
    monkeypatch.setattr(judging, "_peak", iter([1 << 30, 1200 << 20]).__next__)
    assert judge(lambda _: None, path).words == "took 176 MiB for 0 bytes"
    monkeypatch.setattr(judging, "_peak", lambda: 0)
    monkeypatch.setattr(judging, "SECONDS", -1.0)
    assert judge(lambda _: None, path).words == "took 0.0 s"


def test_seeds_of_branches_run(tmp_path: Path) -> None:
    """All but the seeds of data layers, whose files are missing, and of ProposalTarget, whose
    proposals are of one image only.
    """
    refused = []
    path = tmp_path / "net.prototxt"
    for (_, kind, *_), content in zip(LAYERS, branches.seeds(), strict=True):
        path.write_bytes(content)
        verdict = judge(run_net, path)
        if verdict.outcome is not Outcome.LOADED:
            refused.append((kind, verdict.outcome))
    assert refused == [
        (kind, Outcome.REFUSED)
        for kind in ("ProposalTarget", "DenseImageData", "ImageSegData", "ROIData")
    ]
