"""The measured script runs as a task of torchrun's variables, and its figures are found."""

from __future__ import annotations

import sys
from dataclasses import dataclass
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


@pytest.mark.thorough
def test_a_script_is_measured() -> None:
    here: list[Any] = [ThisMachine()]
    command = [sys.executable, str(SCRIPT), "linear", "ddp", "6"]
    seconds, loss = measure(here, command, free_port())
    assert seconds > 0
    assert 0 < loss < 3
