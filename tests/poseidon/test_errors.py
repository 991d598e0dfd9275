"""An error that quotes a damaged file is still one line of what can be printed."""

from __future__ import annotations

import errno
import resource

import numpy as np
import pytest
import torch
import zmq

from poseidon.errors import (
    DataError,
    DefinitionError,
    MachinefileError,
    PoseidonError,
    SnapshotError,
    counted,
    described,
    limit_reached,
    nearest,
    out_of_memory,
    printable,
    shared_memory_full,
)


def test_what_cannot_be_printed_is_escaped() -> None:
    assert printable("a\n\x1b[31m\u2028b\xff é") == "a\\n\\x1b[31m\\u2028bÿ é"
    assert printable("as it was") == "as it was"


def test_memory_that_runs_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**60, dtype=np.uint8)
    on_gpu = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB"
    )
    does = "do not fit; use a smaller batch_size or file, or put fewer workers on this machine"
    assert out_of_memory(of_torch.value) == f"out of memory: {2**60} bytes more {does}"
    assert out_of_memory(of_numpy.value) == f"out of memory: 1.00 EiB more {does}"
    assert out_of_memory(on_gpu) == f"out of memory of the GPU: 2.00 GiB more {does}"
    assert (out_of_memory(MemoryError()) or "").startswith("out of memory; use")
    assert out_of_memory(RuntimeError("CUDA error: an illegal memory access")) is None


def test_limits_are_told_from_other_errors() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"too many open files and connections: ulimit -n allows {limit}; set a higher limit, as ulimit -n 4096"
    assert limit_reached(OSError(errno.EMFILE, "Too many open files")) == says
    assert limit_reached(zmq.ZMQError(errno.EMFILE)) == says
    for error in (
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource"),
    ):
        assert limit_reached(error) or "".startswith("no more threads or processes can be started;")
    assert limit_reached(OSError(errno.EFBIG, "File too large")) is None  # the file system's limit
    assert limit_reached(OSError(errno.ENOENT, "No such file")) is None
    assert limit_reached(ValueError("x")) is None


def test_one_thing_is_in_the_singular() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2)] == [
        "0 workers",
        "1 worker",
        "2 workers",
    ]


@pytest.mark.parametrize("kind", (DataError, DefinitionError, MachinefileError, SnapshotError))
def test_a_long_name_is_cut(kind: type[PoseidonError]) -> None:
    said = str(kind("layer '" + "x" * 10**6 + "' is wrong"))
    assert len(said) < 1010
    assert said.startswith("layer 'xxx") and said.endswith("xxx' is wrong")


def test_an_error_of_a_script_is_described_in_a_line() -> None:
    assert described(ValueError("odd\n  batch")) == "ValueError: odd batch"
    assert described(AssertionError()) == "AssertionError"
    assert len(described(ValueError("x" * 100_000))) < 1100


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


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("unable to write to file </torch_4711_1_0>: No space left on device (28)", True),
        ("unable to allocate shared memory(shm) for file </torch_1_2_3>: Success (0)", True),
        ("It is possible that dataloader's workers are out of shared memory.", True),
        ("This might be caused by insufficient shared memory (shm).", True),
        ("unable to open file </data>", False),
    ],
)
def test_shared_memory_that_is_full(text: str, full: bool) -> None:
    assert ("/dev/shm" in (shared_memory_full(RuntimeError(text)) or "")) is full
