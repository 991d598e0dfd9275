"""With how many threads a program's matrix products are computed, as MKL says it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="torch was built without MKL"
)


def threads_of_products(program: str, variables: Mapping[str, str]) -> set[int]:
    """The numbers of threads of all products in float32 that a Python program computes, with
    these variables.
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "MKL_VERBOSE": "1", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {int(number) for number in re.findall(r"SGEMM.*NThr:(\d+)", done.stdout)}
