"""A question of tests that AMD's GPUs cannot pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.caffe2.proto import DEVICE_NUMBERS


def run_in_hip(gc: Any, dc: Iterable[Any]) -> bool:
    """Return whether a test runs on a HIP device.

    Args:
        gc: the device option of the test.
        dc: the device options that it compares.
    """
    return any(option.device_type == DEVICE_NUMBERS["HIP"] for option in (gc, *dc))
