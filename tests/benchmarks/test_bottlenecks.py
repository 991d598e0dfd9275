"""The cases with a known bottleneck: their definitions can be read, and only the right answer
counts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bottleneck_cases.cases import CASES, Case, Role
from benchmarks.bottleneck_cases.definitions import SOLVER, Data, write_pictures
from benchmarks.bottleneck_cases.harness import Answer
from benchmarks.bottlenecks import row
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.observe.dashboard.bottleneck import Bottleneck, JobLimit


def test_twenty_cases_of_all_causes_and_exchanges() -> None:
    assert len(CASES) == 20
    assert {case.cause for case in CASES} == set(JobLimit) - {JobLimit.UNKNOWN}
    assert {case.exchange for case in CASES} == {"ps", "hybrid", "svb", "allreduce"}
    assert {len(case.roles) for case in CASES} >= {2, 3, 4}
    assert any(case.workers > 1 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_case_is_possible(case: Case, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(case.shape.net())
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    assert read_solver(tmp_path / "solver.prototxt").param.net == "net.prototxt"
    layers = read_net(tmp_path / "net.prototxt").param.layer
    assert layers[0].type == case.shape.data.value
    injected, workers = (
        case.injected,
        sum(role is not Role.SERVER for role in case.roles) * case.workers,
    )
    assert all(client < len(case.roles) for client in injected.shaped)
    assert injected.slowed is None or case.roles[injected.slowed] is not Role.WORKER
    assert all(rank < workers for rank in (*case.shape.compute_of, *case.shape.read_of))
    assert (case.shape.read_s > 0 or bool(case.shape.read_of)) is (case.shape.data is Data.PYTHON)


def test_cause_and_place_count() -> None:
    case = next(case for case in CASES if case.where == "host1")
    found = Bottleneck(
        cause=JobLimit.LINK, where="host1", sentence="The link of host1 is the limit."
    )
    assert case.is_named(found)
    assert not case.is_named(replace(found, where="host2"))
    assert not case.is_named(replace(found, where=""))
    assert not case.is_named(replace(found, cause=JobLimit.SHARD))
    assert replace(case, where=None).is_named(replace(found, where="host2"))


def test_the_table_says_what_the_page_says() -> None:
    case = next(case for case in CASES if case.where == "host1")
    found = Bottleneck(
        cause=JobLimit.LINK, where="host1", sentence="The link of host1 is the limit."
    )
    assert row(3, case, Answer(found=found, named_s=7.4)) == (
        "| 3 | 3 x 1, ps | the link of host1 has 20 Mbit/s | The link of host1 is the limit. | 7 "
        "s | yes |"
    )
    unknown = Bottleneck(cause=JobLimit.UNKNOWN, sentence="Not enough.")
    assert row(3, case, Answer(found=unknown)).endswith("| Not enough. | - | **no** |")


def test_pictures_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bottleneck_cases.definitions.PICTURES", 2)
    monkeypatch.setattr("benchmarks.bottleneck_cases.definitions.PICTURE_SIDE", 64)
    write_pictures(tmp_path)
    assert (tmp_path / "pictures.txt").read_text() == "0.jpg 0\n1.jpg 1\n"
    assert (tmp_path / "1.jpg").stat().st_size > 1000
    assert (tmp_path / "pictures_lmdb").is_dir()
