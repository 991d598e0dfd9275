"""Results, nets and texts agree with real Caffe2's, for the cases whose operators and modules
exist.
"""

from __future__ import annotations

from importlib import import_module

import pytest

from poseidon.caffe2 import core
from poseidon.caffe2.runtime.workspace import Workspace
from tests.support.caffe2_golden import cases, mistakes

# of the player beside the cases
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SLOW = (
    "train/resnet50",
    "train/resnet32",
    "memonger/resnet",
    "inference/resnet",
    "dist/",
    "dpm/fc_8",
)


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded names of nets and workspaces are those of a process of its own."""
    current = import_module("poseidon.caffe2.workspace.current")
    monkeypatch.setattr(core.Net, "_net_names_used", set())
    monkeypatch.setattr(current, "_workspaces", {current.DEFAULT: Workspace()})
    monkeypatch.setattr(current, "_current_name", current.DEFAULT)


@pytest.mark.needs("data")
@pytest.mark.parametrize("name", [name for name in cases() if not name.startswith(SLOW)])
def test_case_agrees(name: str) -> None:
    assert mistakes(name) == []


@pytest.mark.needs("data")
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in cases() if name.startswith(SLOW)])
def test_slow_case_agrees(name: str) -> None:
    assert mistakes(name) == []
