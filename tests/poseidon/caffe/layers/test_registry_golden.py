"""Every recorded case of real Caffe: outputs and gradients to 1e-4 relative, to 1e-5 where
nothing is added up.
"""

from __future__ import annotations

import pytest

from tests.support.golden import cases, differences, tolerance_of

pytestmark = pytest.mark.needs("data")


@pytest.mark.parametrize("name", cases() or [""])
def test_as_caffe(name: str) -> None:
    tolerance = tolerance_of(name)
    assert {key: worst for key, worst in differences(name).items() if not worst <= tolerance} == {}
