"""Every recorded case of real Caffe: outputs and gradients to 1e-4 relative, to 1e-5 where nothing is added up."""

from __future__ import annotations

import pytest

from tests.support.golden import FOLDER, cases, differences, tolerance_of

CASES = cases() or [pytest.param("", marks=pytest.mark.skip(reason=f"no recorded cases: {FOLDER} is absent"))]


@pytest.mark.parametrize("name", CASES)
def test_as_caffe(name: str) -> None:
    tolerance = tolerance_of(name)
    assert {key: worst for key, worst in differences(name).items() if not worst <= tolerance} == {}
