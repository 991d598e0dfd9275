"""Checks of the numbers in augmentation messages."""

from __future__ import annotations

import math

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from poseidon.errors import DataError


def check_finite(name: str, param: Message) -> None:
    """Raise DataError if a float of a message is infinite or not a number.

    Args:
        name: the name of the field that holds the message.
        param: the message.
    """
    for field, value in param.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            for number in [value] if isinstance(value, float) else value:
                if not math.isfinite(number):
                    raise DataError(f"{name} has {field.name} {number:g}, expected a finite number")
