"""Records of tests of operators: written, read again, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest

from poseidon.caffe2 import core
from tests.support.caffe2_testing import hypothesis_test_util as hu
from tests.support.caffe2_testing.hip_test_util import run_in_hip
from tests.support.caffe2_testing.serialized_test import serialized_test_util as serial


class Example(serial.SerializedTestCase):
    factor = 1.0
    examples = 0

    @serial.given(x=hu.tensor(max_dim=2), extra=st.integers(1, 3), **hu.gcs_cpu_only)
    def runTest(self, x, extra, gc, dc):  # type: ignore[no-untyped-def]
        type(self).examples += 1
        op = core.CreateOperator("Relu", ["x"], ["y"])
        self.assertReferenceChecks(gc, op, [x * self.factor], lambda x: [np.maximum(x, 0)])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    serial.configure()


def test_without_records_each_example_is_checked() -> None:
    Example.examples = 0
    Example().debug()
    assert Example.examples > 2
    assert not Path(serial.DATA_DIR).exists()


def test_a_record_is_written_and_agrees(folder: Path) -> None:
    serial.configure(str(folder), generate=True)
    Example().debug()
    record = folder / "operator_test" / f"{Path(__file__).stem}.runTest.zip"
    assert record.exists()
    serial.configure(str(folder), compare=True)
    Example().debug()


def test_a_record_with_other_inputs_runs_on_these(folder: Path) -> None:
    serial.configure(str(folder), generate=True)
    Example().debug()
    serial.configure(str(folder), compare=True)

    class Doubled(Example):
        factor = 2.0

    Doubled().debug()


def test_a_record_with_other_outputs_is_a_failure(folder: Path) -> None:
    serial.configure(str(folder), generate=True)
    case = Example()
    case.should_serialize = True
    op = core.CreateOperator("Relu", ["x"], ["y"])
    case.serialize_test([np.ones(2)], [np.zeros(2)], [], op, hu.cpu_do)
    with pytest.raises(AssertionError, match="tolerance"):
        case.compare_test([np.ones(2)], [np.ones(2)], [])


def test_a_check_without_records(folder: Path) -> None:
    serial.configure(str(folder), generate=True)

    class Unrecorded(Example):
        def assertReferenceChecks(self, *args: Any, **kwargs: Any) -> list[Any]:
            with (
                self.set_disable_serialized_check(True),
                self.set_disable_serialized_check(self.factor != 1),
            ):
                return super().assertReferenceChecks(*args, **kwargs)

    class Doubled(Unrecorded):
        factor = 2.0

    record = folder / "operator_test" / f"{Path(__file__).stem}.runTest.zip"
    Doubled().debug()
    assert not record.exists()
    Unrecorded().debug()
    assert record.exists()


def test_hip_is_asked_of_all_devices() -> None:
    assert not run_in_hip(hu.cpu_do, [hu.cpu_do, hu.cuda_do])
    assert run_in_hip(hu.cpu_do, [hu.hip_do])
    assert run_in_hip(hu.hip_do, [])
