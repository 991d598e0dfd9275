"""Mutates messages field by field: they still parse, so that the readers behind the parser are
tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz.mutation import TYPES

INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
STRINGS = (
    "",
    "data",
    "label",
    "/",
    "..",
    "/nowhere",
    "x" * 5000,
    "a\0b",
    "a\nb",
    "\u2028",
    "xavier",
    "gaussian",
    "Q",
)


@dataclass(frozen=True, slots=True)
class Fields:
    """A mutation of a message's fields.

    Attributes:
        message: its class.
        form: of the content before and after.
    """

    message: type[Message]
    form: str

    def __call__(self, content: bytes, random: Random) -> bytes:
        """Return the content with one to three fields changed; unchanged if it does not parse."""
        message = self.message()
        try:
            if self.form == "text":
                text_format.Parse(content, message)
            else:
                message.ParseFromString(content)
        except (text_format.ParseError, DecodeError, UnicodeDecodeError, RecursionError):
            return content
        for _ in range(random.choice((1, 1, 2, 3))):
            _change(random.choice(list(_blocks(message))), random)
        if self.form == "text":
            return text_format.MessageToString(message).encode()
        return message.SerializePartialToString()


def _blocks(message: Message) -> Iterator[Message]:
    """Yield the message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _blocks(inner)


def _change(block: Message, random: Random) -> None:
    """Set a field to an extreme value, remove, double or move it; sometimes one that was absent."""
    here = [field for field, _ in block.ListFields()]
    every = list(block.DESCRIPTOR.fields)
    field = random.choice(here if here and random.randrange(4) else every)
    if field.message_type is not None:
        _change_block(block, field, random)
    elif _is_many(block, field):
        _change_list(getattr(block, field.name), field, random)
    elif random.randrange(6) == 0:
        block.ClearField(field.name)
    else:
        setattr(block, field.name, _value(field, random))


def _change_block(block: Message, field: FieldDescriptor, random: Random) -> None:
    value: Any = getattr(block, field.name)
    if not _is_many(block, field):
        block.ClearField(field.name) if random.randrange(2) else value.SetInParent()
    elif len(value) and random.randrange(4):
        index, other = random.randrange(len(value)), random.randrange(len(value))
        if random.randrange(2):
            value.add().CopyFrom(value[index])
        elif random.randrange(2):
            value[index].MergeFrom(value[other]) if index != other else None
        else:
            del value[index]
    else:
        value.add()


def _change_list(values: Any, field: FieldDescriptor, random: Random) -> None:
    if not len(values) or random.randrange(5) == 0:
        values.append(_value(field, random))
    elif random.randrange(3) == 0:
        del values[random.randrange(len(values))]
    else:
        values[random.randrange(len(values))] = _value(field, random)


def _value(field: FieldDescriptor, random: Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return bool(random.randrange(2))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice(field.enum_type.values).number
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return random.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.randrange(20))
        return random.choice(TYPES).decode() if field.name == "type" else random.choice(STRINGS)
    return random.choice([number for number in INTEGERS if _fits(number, kind)])


def _fits(number: int, kind: int) -> bool:
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return 0 <= number < 1 << bits
    return -(1 << bits - 1) <= number < 1 << bits - 1


def _is_many(block: Message, field: FieldDescriptor) -> bool:
    return hasattr(getattr(block, field.name), "append") or hasattr(
        getattr(block, field.name), "add"
    )
