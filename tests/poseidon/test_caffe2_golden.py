"""Results, nets and texts agree with real Caffe2's, for the cases whose operators and modules
exist.
"""

from __future__ import annotations

import pytest

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
