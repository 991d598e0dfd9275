"""An error that quotes a damaged file is still one line of what can be printed."""

from __future__ import annotations

import pytest

from poseidon.errors import (
    DataError,
    DefinitionError,
    PoseidonError,
    SnapshotError,
    counted,
    nearest,
    printable,
)


def test_what_cannot_be_printed_is_escaped() -> None:
    assert printable("a\n\x1b[31m\u2028b\xff é") == "a\\n\\x1b[31m\\u2028bÿ é"
    assert printable("as it was") == "as it was"


def test_one_thing_is_in_the_singular() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]


@pytest.mark.parametrize("kind", (DataError, DefinitionError, SnapshotError))
def test_a_long_name_is_cut(kind: type[PoseidonError]) -> None:
    said = str(kind("layer '" + "x" * 10**6 + "' is wrong"))
    assert len(said) < 1010
    assert said.startswith("layer 'xxx") and said.endswith("xxx' is wrong")


def test_a_definitions_place_is_kept() -> None:
    error = DefinitionError("wrong\x08", source="a\tb", line=3)
    assert str(error) == "a\\tb:3: wrong\\x08"
    assert error.message == "wrong\\x08"


@pytest.mark.parametrize(
    ("name", "legal", "meant"),
    [
        ("conv_param", ["concat_param", "convolution_param", "crop_param"], "convolution_param"),
        ("Conv", ["Concat", "Convolution", "Deconvolution"], "Convolution"),
        ("batchsize", ["batch_size", "size"], "batch_size"),
        ("Kernel-Size", ["kernel_w", "kernel_size"], "kernel_size"),
        ("max_iterations", ["max_iter", "iter_size"], "max_iter"),
        ("interval", ["snapshot", "test_interval"], "test_interval"),
        ("extract", ["train", "extract_features"], "extract_features"),
        ("kernal_size", ["kernel_size", "kernel_w"], "kernel_size"),
        ("adam", ["SGD", "Adam", "AdaGrad"], "Adam"),
        ("sdg", ["SGD", "Adam"], "SGD"),
        ("qqq", ["pad"], None),
        ("", ["pad"], None),
    ],
)
def test_the_nearest_name(name: str, legal: list[str], meant: str | None) -> None:
    assert nearest(name, legal) == meant
