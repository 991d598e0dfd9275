"""The measured script runs as a task of torchrun's variables, and its figures are found."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ddp_scripts import SCRIPT, measure
from tests.support.free_ports import free_port

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class ThisMachine:
    """A host that is not a namespace."""

    index: int = 0
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


def test_a_script_is_measured() -> None:
    here: list[Any] = [ThisMachine()]
    command = [sys.executable, str(SCRIPT), "linear", "ddp", "6"]
    seconds, loss = measure(here, command, free_port())
    assert seconds > 0
    assert 0 < loss < 3


def test_a_job_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    here: list[Any] = [ThisMachine()]
    with pytest.raises(SystemExit, match=r"has not measured:\n.*no such thing"):
        measure(here, [sys.executable, "-c", "raise SystemExit('no such thing')"], 1)
