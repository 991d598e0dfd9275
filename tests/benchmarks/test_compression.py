"""The ways that are compared, their bytes, and the table."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.compression import Found, ddp_bytes, flags_of, table, trainings
from benchmarks.small_trainings import TRAININGS, Samples, Task


@pytest.mark.parametrize(
    ("way", "flags"),
    [
        ("none", []),
        ("float16", ["--wire_precision=float16"]),
        ("topk:0.01/int8", ["--compress=topk:0.01/int8"]),
        ("H=8", ["--local_steps=8,outer_lr=1,outer_momentum=0.5"]),
        (
            "H=4:0.7:0.9+*=int4",
            ["--local_steps=4,outer_lr=0.7,outer_momentum=0.9", "--compress=*=int4"],
        ),
        (
            "H=32+int4",
            ["--local_steps=32,outer_lr=1,outer_momentum=0.5", "--compress=int4"],
        ),
    ],
)
def test_a_way_is_flags(way: str, flags: list[str]) -> None:
    assert flags_of(way) == flags


def test_an_unknown_training_is_named() -> None:
    assert trainings("lenet, resnet") == ["lenet", "resnet"]
    with pytest.raises(
        argparse.ArgumentTypeError, match="unknown training 'residual'; known: lenet, "
    ):
        trainings("lenet,residual")


def test_bytes_of_hooks() -> None:
    shapes = [(64, 100), (64,)]
    assert ddp_bytes("", shapes, 10) == 10 * 2 * 4 * 6464
    assert ddp_bytes("fp16", shapes, 10) == 10 * 2 * 2 * 6464
    assert ddp_bytes("powersgd:2", shapes, 10) == 10 * 2 * 4 * (2 * 164 + 64)


def test_the_table_compares_equal_seeds() -> None:
    found: Found = {
        ("quick", "none", 1): (1.0, 800.0),
        ("quick", "none", 2): (2.0, 800.0),
        ("quick", "int8", 1): (1.1, 200.0),
        ("quick", "int8", 2): (2.1, 200.0),
        ("quick", "ddp", 1): (1.0, 600.0),
        ("quick", "ddp fp16", 1): (1.02, 300.0),
        ("quick", "sign", 3): (1.0, 1.0),
    }
    assert table(found, ["quick"], ["none", "int8", "ddp fp16", "sign"])[2:] == [
        "| none | 1.5000 | +0.0% (+0.0% to +0.0%) | 1.0 |",
        "| `int8` | 1.6000 | +7.5% (+5.0% to +10.0%) | 4.0 |",
        "| ddp fp16 | 1.0200 | +2.0% | 2.0 |",
        "| `sign` |  |  |  |",
    ]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_seed_gives_the_same_training(name: str) -> None:
    images = torch.arange(20 * 3 * 32 * 32, dtype=torch.uint8).view(20, 3, 32, 32)
    if name == "lenet":
        images = images[:, :1, :28, :28]
    classes = torch.arange(20) % 10
    samples = None if name == "transformer" else Samples(images, classes, images.float(), classes)
    losses = []
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
        task = Task(name, samples, seed, rank)
        losses.append(task.loss(task.module).item())
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
