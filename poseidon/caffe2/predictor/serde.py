"""Messages as bytes, as the files of predictors hold them."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

Proto = TypeVar("Proto", bound=Message)


def serialize_protobuf_struct(protobuf_struct: Message) -> bytes:
    return protobuf_struct.SerializeToString()


def deserialize_protobuf_struct(serialized_protobuf: bytes, struct_type: type[Proto]) -> Proto:
    """Return the message of a type that bytes hold.

    Raises:
        google.protobuf.message.DecodeError: they hold none.
    """
    return struct_type.FromString(serialized_protobuf)
