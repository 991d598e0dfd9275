"""Prototxt text into messages and back.

Law: nothing of `google.protobuf.text_format` leaves this module; a refusal is a DefinitionError
with file, line and column, in the words of the schema.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar, cast

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from poseidon.errors import DefinitionError
from poseidon.proto.diagnosis import diagnose
from poseidon.proto.strings import strings_are_text
from poseidon.proto.tokens import map_comments, settings

M = TypeVar("M", bound=Message)
# Bytes that no prototxt has: control characters, and the first byte of the tag of NetParameter.layer where no text goes on.
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f]|[\x80-\xff]")

_STRANGE = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are no UTF-8


def parse(text: str, message: M, *, source: str) -> M:
    """Fills `message` from prototxt and returns it.

    Args:
        text: prototxt.
        message: an empty message of the type that the text should hold.
        source: the file that the text came from, or another name for it in errors.

    Raises:
        DefinitionError: the text is no legal prototxt, does not fit the schema, or leaves out a
            required setting. `message` is then half filled and of no use.
    """
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise _explained(text, message, error, source) from error
    # Every message class has it, but the stubs do not say so.
    missing = cast(Any, message).FindInitializationErrors()
    if missing:
        raise _missing(text, missing[0], source)
    return message


def read(path: Path, message: M) -> M:
    """Fills `message` from a prototxt file and returns it.

    Raises:
        DefinitionError: the file cannot be read, is no text or holds nothing; or as in `parse`.
    """
    text = read_text(path)
    parse(text, message, source=str(path))
    if not message.ListFields():
        raise DefinitionError("the file is empty: it holds no settings", source=str(path))
    return message


def read_text(path: Path) -> str:
    """The text of a definition file, UTF-8 with or without a byte order mark.

    Raises:
        DefinitionError: there is no such file, it is a folder, it may not be read, or it is no text.
    """
    return decode(read_content(path), source=str(path))


def read_content(path: Path) -> bytes:
    """The bytes of a definition file.

    Raises:
        DefinitionError: there is no such file, it is a folder, or it may not be read.
    """
    source = str(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DefinitionError("there is no such file", source=source) from None
    except IsADirectoryError:
        raise DefinitionError("this is a folder; a prototxt file is expected", source=source) from None
    except OSError as error:
        raise DefinitionError(f"the file cannot be read: {error.strerror}", source=source) from error


def decode(content: bytes, *, source: str) -> str:
    """The text that a file holds: UTF-8; comments may be in any encoding of bytes, since nothing reads them.

    Raises:
        DefinitionError: it holds no text.
    """
    if b"\0" in content:
        raise DefinitionError("this is a binary file; prototxt text is expected", source=source)
    text = content.decode("utf-8-sig", errors="surrogateescape")
    strange = _STRANGE.search(text)
    if strange is not None:
        text = map_comments(text, lambda comment: _STRANGE.sub("?", comment))
        strange = _STRANGE.search(text)
    if strange is None:
        return text
    byte, line = ord(strange.group()) & 0xFF, text.count("\n", 0, strange.start()) + 1
    raise DefinitionError(
        f"the file is no UTF-8 text (byte 0x{byte:02x}); prototxt text is expected", source=source, line=line
    )


def parse_binary(content: bytes, message: M) -> M | None:
    """`message` filled from its binary form; None if the content is text, or no such message.

    A net in binary form cannot be taken for text: the tag of its layers is no UTF-8.
    """
    if not _NO_TEXT.search(content):
        return None
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message if strings_are_text(message) and message.ListFields() else None


def to_text(message: Message) -> str:
    """The message as prototxt, in Caffe's form: one setting a line, two spaces for each block."""
    return text_format.MessageToString(message)


def layer_lines(text: str) -> list[int]:
    """The lines, from 1, of the top-level `layer` and `layers` blocks of a net's text, in order."""
    return [setting.line for setting in settings(text) if setting.path in (("layer",), ("layers",))]


def _explained(text: str, message: Message, error: text_format.ParseError, source: str) -> DefinitionError:
    mistake = diagnose(text, cast(Descriptor, message.DESCRIPTOR))
    if mistake is not None:
        return DefinitionError(mistake.message, source=source, line=mistake.line, column=mistake.column)
    # A refusal that the diagnosis does not know: better the library's words than none.
    line, column = error.GetLine(), error.GetColumn()
    words = str(error).removeprefix(f"{line}:{column} : ").rstrip(".") or "the text does not parse"
    return DefinitionError(words, source=source, line=line, column=column)


def _missing(text: str, path: str, source: str) -> DefinitionError:
    """For a required setting left out, as protobuf names it: `layer[2].clip_param.min`."""
    *blocks, name = path.split(".")
    wanted = tuple(block.partition("[")[0] for block in blocks)
    inside = f" in {blocks[-1].partition('[')[0]}" if blocks else ""
    lines = [setting.line for setting in settings(text) if setting.path == wanted]
    # Of several such blocks the complete ones cannot be told apart here; the layer's can.
    index = int(blocks[0].partition("[")[2].rstrip("]") or 0) if blocks else 0
    outer = [setting.line for setting in settings(text) if setting.path == wanted[:1]]
    line = next((line for line in lines if index < len(outer) and line >= outer[index]), None)
    return DefinitionError(f"required field '{name}' is missing{inside}", source=source, line=line)
