"""The command line of the cluster: flags in, one sentence where it cannot run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.testbed import measurement_lock
from benchmarks.testbed.hooks import ALL_HOOKS
from benchmarks.testbed.worker_settings import PoseidonSettings


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Do not wait for a measurement that runs beside the tests."""
    monkeypatch.setattr(
        cluster, "alone", lambda report: measurement_lock.alone(report, tmp_path / "lock")
    )


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("bytes", "hosts", [2, 4, 8]),
        ("bytes --exchange ps,svb", "exchange", ["ps", "svb"]),
        ("speed --rates 250,none", "rates", [250.0, None]),
        ("speed --buckets=", "buckets", ()),
        ("speed", "buckets", (1.0, 5.0, 25.0)),
        ("speed", "hooks", ()),
        ("speed --hooks fp16,powersgd:2", "hooks", ("fp16", "powersgd:2")),
        ("speed --hooks all", "hooks", ALL_HOOKS),
        ("speed", "ours", None),
        (
            "speed --ours hybrid+int8,ps+H32",
            "ours",
            (PoseidonSettings(compress="int8"), PoseidonSettings(exchange="ps", local_steps=32)),
        ),
        ("speed", "in_clear", False),
        ("speed --compute real", "net", "gpt-20m"),
        ("speed --compute real --net gpt-2m", "hosts", 2),
        ("speed --compute real", "buckets", ()),
        ("speed --compute real --hooks fp16", "hooks", ("fp16",)),
        ("speed --compute real --rates 10", "rates", [10.0]),
        ("overlap", "ratios", (0.5, 1.0, 2.0)),
        ("paper --hosts 2", "hosts", [2]),
        ("links --ddp", "ddp", True),
    ],
)
def test_flags(words: str, field: str, value: object) -> None:
    assert getattr(cluster.parse(words.split()), field) == value


@pytest.mark.parametrize(
    "words",
    [
        "",
        "speed --exchange mpi",
        "speed --hooks powersgd",
        "speed --ours ps+zip",
        "speed --net lenet5000",
        "speed --net gpt-2m",
        "speed --compute real --net vgg19",
        "speed --compute none",
        "bytes --hosts x",
    ],
)
def test_mistakes_end_with_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cluster.parse(words.split())
    assert leaving.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("speed", 32),
        ("speed --net gpt2", 8192),
        ("speed --batch 4", 4),
        ("speed --compute real", 512),
        ("speed --compute real --net resnet50", 2),
    ],
)
def test_a_batch_has_the_rows_of_its_net(words: str, count: int) -> None:
    assert cluster.rows(cluster.parse(words.split())) == count


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("speed", 5),
        ("paper", 5),
        ("speed --compute real --net gpt-2m", 20),
        ("speed --compute real --iterations 7", 7),
    ],
)
def test_a_round_has_the_iterations_of_its_net(words: str, count: int) -> None:
    assert cluster.effort(cluster.parse(words.split())).iterations == count


def test_a_computed_net_is_trained_by_its_own_rate() -> None:
    training = cluster.training(cluster.parse(["speed", "--compute", "real", "--net", "gpt-2m"]))
    assert (training.computed, training.rate, training.compute_s) == ("gpt-2m", 0.001, 0.0)
    assert sum(layer.elements for layer in training.layers) == 1_853_568


@pytest.mark.parametrize("command", ["bytes", "paper", "clean"])
def test_without_root_one_sentence_is_told(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster.main([command]) == 1
    assert "only root can make; run this as root" in capsys.readouterr().err
