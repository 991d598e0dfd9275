"""What Caffe2's tests of operators are built on: references, and records of operators in files.

A record is a zip file `<test file>.<test>.zip`: `op.pb`, the gradient operators `grad_<i>.pb`, and
`inout.npz` with `input_<i>`, `output_<i>` and `device_type`. Records are read and written where
`testWithArgs` or `configure` asks for it. Needs hypothesis, which is installed for development
only.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import sys
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import hypothesis
import numpy as np

from poseidon.caffe2 import gradient_checker
from poseidon.caffe2.proto import caffe2_pb2
from tests.support.caffe2_testing import hypothesis_test_util as hu

operator_test_type = "operator_test"
DATA_DIR = str(Path(__file__).parent / "data")


class _Options(threading.local):
    def __init__(self) -> None:
        self.output_dir = DATA_DIR
        self.generate = False
        self.compare = False
        self.disabled = False


_options = _Options()


def configure(output_dir: str = DATA_DIR, generate: bool = False, compare: bool = False) -> None:
    """Choose what tests of this thread do with records.

    Args:
        output_dir: the folder of records; they lie in its folder `operator_test`.
        generate: whether each test writes its record.
        compare: whether each test compares with its record.
    """
    _options.output_dir, _options.generate, _options.compare = output_dir, generate, compare


def given(
    *given_args: Any, **given_kwargs: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like hypothesis' `given`; one fixed example, whose record is kept,
    comes before the others.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        examples: Any = hypothesis.given(*given_args, **given_kwargs)
        one_example: Any = hypothesis.settings(max_examples=1)
        seeded: Any = hypothesis.seed(0)
        several = examples(test)
        fixed = seeded(one_example(examples(_copy_of(test))))

        @functools.wraps(several)
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            self.should_serialize = True
            fixed(self, *args, **kwargs)
            self.should_serialize = False
            several(self, *args, **kwargs)

        return run

    return decorate


def _copy_of(test: Callable[..., None]) -> Callable[..., None]:
    """Return another function of the same signature: hypothesis keeps settings on the function
    itself.
    """

    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    for name in [name for name in vars(copy) if name.startswith("_hypothesis")]:
        delattr(copy, name)
    return copy


def _gradient_operators(op: caffe2_pb2.OperatorDef) -> list[caffe2_pb2.OperatorDef]:
    """Return the gradient operators of an operator; none where it has no gradient."""
    try:
        return gradient_checker.getGradientForOp(op)[0]
    except Exception:  # noqa: BLE001 (an operator without gradient says so in several ways)
        return []


class SerializedTestCase(hu.HypothesisTestCase):
    """A test of operators that can keep its first example in a file."""

    should_serialize = False

    def get_output_dir(self) -> str:
        """Return the folder of records."""
        return str(Path(_options.output_dir) / operator_test_type)

    def get_output_filename(self) -> str:
        """Return the name of the test's record, without its ending."""
        return f"{Path(inspect.getfile(type(self))).stem}.{self.id().rpartition('.')[2]}"

    def _record(self) -> Path:
        return Path(self.get_output_dir()) / f"{self.get_output_filename()}.zip"

    def serialize_test(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        grad_ops: Sequence[caffe2_pb2.OperatorDef],
        op: caffe2_pb2.OperatorDef,
        device_option: caffe2_pb2.DeviceOption,
    ) -> None:
        """Write the record of a test."""
        arrays = io.BytesIO()
        named: dict[str, Any] = {
            f"input_{index}": np.asarray(value) for index, value in enumerate(inputs)
        }
        named.update({f"output_{index}": np.asarray(value) for index, value in enumerate(outputs)})
        np.savez_compressed(arrays, device_type=int(device_option.device_type), **named)
        self._record().parent.mkdir(parents=True, exist_ok=True)
        with ZipFile(self._record(), "w") as record:
            record.writestr("op.pb", op.SerializeToString())
            record.writestr("inout.npz", arrays.getvalue())
            for index, gradient in enumerate(grad_ops):
                record.writestr(f"grad_{index}.pb", gradient.SerializeToString())

    def compare_test(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        grad_ops: Sequence[caffe2_pb2.OperatorDef],
        atol: float = 1e-7,
        rtol: float = 1e-7,
    ) -> None:
        """Assert that outputs and gradient operators match the test's record.

        Where the inputs differ the recorded operator runs on the recorded inputs.
        """
        with ZipFile(self._record()) as record:
            kept = np.load(io.BytesIO(record.read("inout.npz")))
            of_record = [kept[f"input_{index}"] for index in range(len(inputs))]
            if not _equal(inputs, of_record):
                op = caffe2_pb2.OperatorDef.FromString(record.read("op.pb"))
                device = caffe2_pb2.DeviceOption(device_type=int(kept["device_type"]))
                outputs = hu.runOpOnInput(device, op, of_record)
                grad_ops = _gradient_operators(op)
            for index, found in enumerate(outputs):
                np.testing.assert_allclose(found, kept[f"output_{index}"], atol=atol, rtol=rtol)
            for index, gradient in enumerate(grad_ops):
                wanted = caffe2_pb2.OperatorDef.FromString(record.read(f"grad_{index}.pb"))
                self.assertEqual(wanted, gradient)

    def assertSerializedOperatorChecks(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        gradient_operator: Sequence[caffe2_pb2.OperatorDef],
        op: caffe2_pb2.OperatorDef,
        device_option: caffe2_pb2.DeviceOption,
        atol: float = 1e-7,
        rtol: float = 1e-7,
    ) -> None:
        """Write the test's record or compare with it, in its fixed example and where that was
        asked for.
        """
        if self.should_serialize and _options.generate:
            self.serialize_test(inputs, outputs, gradient_operator, op, device_option)
        elif self.should_serialize and _options.compare:
            self.compare_test(inputs, outputs, gradient_operator, atol, rtol)

    @contextmanager
    def set_disable_serialized_check(self, val: bool) -> Iterator[None]:
        """Leave records alone inside the block, or, with False, not."""
        before, _options.disabled = _options.disabled, val
        try:
            yield
        finally:
            _options.disabled = before

    def assertReferenceChecks(
        self,
        device_option: Any,
        op: Any,
        inputs: Sequence[Any],
        reference: Callable[..., Any],
        input_device_options: Any = None,
        threshold: float = 1e-4,
        output_to_grad: Any = None,
        grad_reference: Any = None,
        atol: float | None = None,
        outputs_to_check: Sequence[int] | None = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> list[Any]:
        """See `HypothesisTestCase.assertReferenceChecks`; the record of the test is compared or
        written too.
        """
        outputs = super().assertReferenceChecks(
            device_option,
            op,
            inputs,
            reference,
            input_device_options,
            threshold,
            output_to_grad,
            grad_reference,
            atol,
            outputs_to_check,
            ensure_outputs_are_inferred,
        )
        wanted = (_options.generate or _options.compare) and not _options.disabled
        if self.should_serialize and wanted:
            gradients = _gradient_operators(op)
            tolerance = threshold if atol is None else atol
            self.assertSerializedOperatorChecks(
                inputs, outputs, gradients, op, device_option, tolerance, threshold
            )
        return outputs


def _equal(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(
        np.array_equal(a, b) for a, b in zip(values, others, strict=True)
    )


def testWithArgs() -> None:
    """Run the tests of the main module; `-G` writes records, `-O` names their folder, `-D`
    compares with none.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("-G", "--generate-serialized", action="store_true", help="write records")
    parser.add_argument("-O", "--output", default=DATA_DIR, help="the folder of records")
    parser.add_argument("-D", "--disable-serialized_check", action="store_true", dest="disable")
    parser.add_argument(
        "-C", "--disable-gen-coverage", action="store_true", help="accepted, without effect"
    )
    parser.add_argument("unittest_args", nargs="*")
    args = parser.parse_args()
    sys.argv[1:] = args.unittest_args
    has_records = (Path(args.output) / operator_test_type).is_dir()
    configure(args.output, args.generate_serialized, has_records and not args.disable)
    unittest.main()


testWithArgs.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test
