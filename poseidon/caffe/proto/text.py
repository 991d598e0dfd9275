"""Reading and writing of prototxt text and binary messages.

Law: no exception of `google.protobuf.text_format` leaves this module. A parse error is a
DefinitionError with file, line and column, in terms of the schema.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar, cast

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import text_of
from poseidon.caffe.proto.caffe_pb2 import BlobProto
from poseidon.caffe.proto.diagnosis import diagnose
from poseidon.caffe.proto.tokens import map_comments, settings
from poseidon.errors import DefinitionError

M = TypeVar("M", bound=Message)
# Bytes that no ASCII prototxt has: control characters, and those above 0x7f, such as the tag of
# NetParameter.layer.
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f]|[\x80-\xff]")

_LAYER = re.compile(r"\blayers?\s*:?\s*[{<]")
MOST_LAYERS = 50_000
"""A layer takes half a millisecond; the deepest nets that were published have some thousands."""

# `surrogateescape` decodes bytes that are not UTF-8 to these
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def parse(text: str, message: M, *, source: str) -> M:
    """Parse prototxt into `message` and return it.

    Args:
        message: an empty message of the type that the text should hold.
        source: the file of the text, or another name for it, for errors.

    Raises:
        DefinitionError: the text is not legal prototxt, does not match the schema, or leaves out a
            required setting. `message` is then incomplete. Or it has more than `MOST_LAYERS`
            layers.
    """
    layers = len(_LAYER.findall(text))
    if layers > MOST_LAYERS:
        raise DefinitionError(f"{layers:,} layers; expected at most {MOST_LAYERS:,}", source=source)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise _explained(text, message, error, source) from error
    # Every message class has this method, but the stubs lack it.
    missing = cast(Any, message).FindInitializationErrors()
    if missing:
        raise _missing(text, missing[0], source)
    return message


def read(path: Path, message: M) -> M:
    """Parse a prototxt file into `message` and return it.

    Raises:
        DefinitionError: the file cannot be read, is not text, or is empty; or as in `parse`.
    """
    text = read_text(path)
    parse(text, message, source=str(path))
    if not message.ListFields():
        raise DefinitionError("the file is empty: it holds no settings", source=str(path))
    return message


def read_text(path: Path) -> str:
    """Read the text of a definition file, UTF-8 with or without a byte order mark.

    Raises:
        DefinitionError: there is no such file, it is a folder, it cannot be read, or it is not
            text.
    """
    return decode(read_content(path), source=str(path))


def read_content(path: Path) -> bytes:
    """Read the bytes of a definition file.

    Raises:
        DefinitionError: there is no such file, it is a folder, or it cannot be read.
    """
    source = str(path)
    try:
        return read_definition(path)
    except FileNotFoundError:
        raise DefinitionError("there is no such file", source=source) from None
    except IsADirectoryError:
        raise DefinitionError(
            "this is a folder; a prototxt file is expected", source=source
        ) from None
    except OSError as error:
        raise DefinitionError(
            f"the file cannot be read: {error.strerror}", source=source
        ) from error


def decode(content: bytes, *, source: str) -> str:
    """Decode the text of a file as UTF-8. Comments may have any encoding.

    Raises:
        DefinitionError: the content is not UTF-8 text.
    """
    text = text_of(content)
    if text is None:
        raise DefinitionError("this is a binary file; prototxt text is expected", source=source)
    invalid = _NOT_UTF8.search(text)
    if invalid is not None:
        text = map_comments(text, lambda comment: _NOT_UTF8.sub("?", comment))
        invalid = _NOT_UTF8.search(text)
    if invalid is None:
        return text
    byte, line = ord(invalid.group()) & 0xFF, text.count("\n", 0, invalid.start()) + 1
    raise DefinitionError(
        f"the file is not UTF-8 text (byte 0x{byte:02x}); prototxt text is expected",
        source=source,
        line=line,
    )


def parse_binary(content: bytes, message: M) -> M | None:
    """Parse binary content into `message` and return it; None if the content is text or not such
    a message.

    A binary net cannot be mistaken for text: the tag of its layers is not UTF-8.
    """
    if not _NO_TEXT.search(content):
        return None
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message if strings_are_text(message) and message.ListFields() else None


def strings_are_text(message: Message) -> bool:
    """Return whether every string in a message, at any depth, is UTF-8.

    protobuf returns a string that is not UTF-8 as bytes, because Caffe's schema (proto2) does not
    require UTF-8. Readers of binary files call this once, so that later code meets no bytes. Blobs
    have no strings and are skipped.
    """
    inner: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner += [value] if isinstance(value, Message) else value
        elif field.type == FieldDescriptor.TYPE_STRING:
            strings = [value] if isinstance(value, (str, bytes)) else value
            if any(isinstance(string, bytes) for string in strings):
                return False
    return all(strings_are_text(part) for part in inner if not isinstance(part, BlobProto))


def to_text(message: Message) -> str:
    """Return the message as prototxt in Caffe's layout: one setting a line, blocks indented by
    two spaces.
    """
    return text_format.MessageToString(message)


def layer_lines(text: str) -> list[int]:
    """Return the line numbers, from 1, of the top-level `layer` and `layers` blocks of a net's
    text, in order.
    """
    return [setting.line for setting in settings(text) if setting.path in (("layer",), ("layers",))]


def _explained(
    text: str, message: Message, error: text_format.ParseError, source: str
) -> DefinitionError:
    mistake = diagnose(text, cast(Descriptor, message.DESCRIPTOR))
    if mistake is not None:
        return DefinitionError(
            mistake.message, source=source, line=mistake.line, column=mistake.column
        )
    # The diagnosis found nothing: use the library's message.
    line, column = error.GetLine(), error.GetColumn()
    reason = str(error).removeprefix(f"{line}:{column} : ").rstrip(".") or "the text does not parse"
    return DefinitionError(reason, source=source, line=line, column=column)


def _missing(text: str, path: str, source: str) -> DefinitionError:
    """Return the error for a missing required field with this protobuf path:
    `layer[2].clip_param.min`.
    """
    *blocks, name = path.split(".")
    wanted = tuple(block.partition("[")[0] for block in blocks)
    inside = f" in {blocks[-1].partition('[')[0]}" if blocks else ""
    lines = [setting.line for setting in settings(text) if setting.path == wanted]
    # The path has the index of the layer, not the index of an inner block among its like.
    index = int(blocks[0].partition("[")[2].rstrip("]") or 0) if blocks else 0
    outer = [setting.line for setting in settings(text) if setting.path == wanted[:1]]
    line = next((line for line in lines if index < len(outer) and line >= outer[index]), None)
    return DefinitionError(f"required field '{name}' is missing{inside}", source=source, line=line)
