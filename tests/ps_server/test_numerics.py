"""How a process computes: the number of threads, seen by what MKL says of each product, and
denormal numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from ps_server import numerics
from ps_server.process_environment import environment
from tests.support.mkl import needs_mkl, threads_of_products

ROOT = Path(__file__).parents[2]
thorough = partial(pytest.param, marks=pytest.mark.thorough)
"""A control, or a case like another one; each imports torch in a process of its own."""
PROGRAM = """
import threading, torch
from ps_server import numerics
def work():
    {prepare}
    torch.mm(left, right)
left, right = torch.ones(96, 128), torch.ones(128, 256)
numerics.prepare_process(threads=1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@needs_mkl
@pytest.mark.parametrize(
    ("prepare", "variables", "threads"),
    [
        thorough("pass", {"OMP_NUM_THREADS": "4"}, {4}),  # what the module is for
        ("numerics.prepare_thread()", {"OMP_NUM_THREADS": "4"}, {1}),
        thorough("pass", environment(1, {}), {1}),
    ],
)
def test_a_new_thread_computes_with_the_threads_of_its_process(
    prepare: str, variables: Mapping[str, str], threads: set[int]
) -> None:
    assert threads_of_products(PROGRAM.format(prepare=prepare), variables) == threads


DENORMALS = """
import threading, torch
from ps_server import numerics
{prepare}
found = set()
def small(place, tensor=None):
    tensor = torch.full((64,), 1e-30) * 1e-10 if tensor is None else tensor
    if tensor.ne(0).any():
        found.add(place)
def thread():
    small("thread")
    small("of its OpenMP", torch.full((1 << 20,), 1e-30) * 1e-10)
small("main")
small("OpenMP", torch.full((1 << 20,), 1e-30) * 1e-10)
started = threading.Thread(target=thread)
started.start()
started.join()
x = torch.full((1 << 20,), 1e-20, requires_grad=True)
x.register_hook(lambda gradient: small("autograd"))
(x * 1e-20).backward(torch.full_like(x, 1e-20))
small("gradient", x.grad)
small("numpy", torch.from_numpy(torch.full((64,), 1e-30).numpy() * 1e-10))
print(sorted(found))
"""


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        thorough(
            "torch.set_num_threads(4)",
            ["OpenMP", "autograd", "gradient", "main", "numpy", "of its OpenMP", "thread"],
        ),
        thorough("numerics.prepare_process(4)", []),
        ("numerics.prepare_process(); torch.set_num_threads(4)", []),
    ],
    ids=["unprepared", "prepared", "of-any-threads"],
)
def test_denormal_numbers_are_zero_in_every_thread(prepare: str, found: list[str]) -> None:
    program = DENORMALS.format(prepare=prepare)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(found)


@needs_mkl
@pytest.mark.parametrize(
    ("before", "takes"), [("", "True"), thorough("torch.ones(9, 9) @ torch.ones(9)", "False")]
)
def test_mkl_takes_the_code_of_a_job_before_its_first_product(before: str, takes: str) -> None:
    program = (
        f"import torch; from ps_server import numerics; {before}\n"
        "print(numerics.take_code_for_all_alignments())"
    )
    variables = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [takes]


def test_a_gpu_is_named_with_the_libraries_that_bits_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    name = numerics.processor_name(torch.device("cuda", 1))
    assert name == "NVIDIA H100, CUDA 12.8, cuDNN 91002, NCCL 2.27.3"


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9")
def test_what_a_script_sets_by_torchs_newer_flags_is_read() -> None:
    """torch refuses to read the older flags then."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        for products, convolutions, expected in (
            ("ieee", "ieee", "float32"),
            ("tf32", "ieee", "tf32"),
            ("ieee", "tf32", "tf32"),
        ):
            matmul.fp32_precision, conv.fp32_precision = products, convolutions
            assert numerics._type_of(torch.device("cuda", 0)) == expected
            assert numerics.Computation.here(torch.device("cpu")).arithmetic == "float32"
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
