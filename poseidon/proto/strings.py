"""Whether the strings of a binary message are text.

Law: Caffe's schema does not hold strings to UTF-8, and protobuf hands one that is not over as bytes; whoever reads a
binary file looks at all of them at once, so that nobody meets a bad one later.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from poseidon.proto.caffe_pb2 import BlobProto


def strings_are_text(message: Message) -> bool:
    """Whether every string in a message, at any depth, is UTF-8. Blobs, which have none, are passed over."""
    inner: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner += [value] if isinstance(value, Message) else value
        elif field.type == FieldDescriptor.TYPE_STRING:
            strings = [value] if isinstance(value, (str, bytes)) else value
            if any(isinstance(string, bytes) for string in strings):
                return False
    return all(strings_are_text(part) for part in inner if not isinstance(part, BlobProto))
