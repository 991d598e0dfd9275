"""The measured script runs as a task of torchrun's variables, and its figures are found."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ddp_scripts import TRAINS, measure
from tests.support.free_ports import free_port

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class ThisMachine:
    """A host that is not a namespace."""

    index: int = 0
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


def test_a_script_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS, encoding="utf-8")
    here: list[Any] = [ThisMachine()]
    seconds, loss = measure(here, [sys.executable, str(script), "linear", "5"], free_port())
    assert seconds > 0
    assert 0 < loss < 3


def test_a_job_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    here: list[Any] = [ThisMachine()]
    with pytest.raises(SystemExit, match=r"has not measured:\n.*no such thing"):
        measure(here, [sys.executable, "-c", "raise SystemExit('no such thing')"], 1)
