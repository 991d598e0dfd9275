"""Solver fields that the command line sets in place of the file's: `base_lr=0.1`,
`train_state.level=2`.

Law: a value is prototxt and is read by the parser for files; only the quotes of a string may be
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import cast

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from poseidon.base.text_files import escaped
from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.values import is_quoted, listing, nearest_field
from poseidon.errors import DefinitionError

OWN_FLAGS = frozenset({"max_iter", "display", "test_interval", "solver_mode"})
"""Fields that have a flag of their own, which errors about them name."""
TRAIN_NET_FIELDS = ("net", "net_param", "train_net", "train_net_param")
_ALTERNATIVES = (TRAIN_NET_FIELDS, ("type", "solver_type"))
"""Groups of fields with the same meaning: a setting for one of them clears the others."""


def override(param: SolverParameter, settings: Iterable[str]) -> SolverParameter:
    """Return a copy of a solver with some fields set.

    Args:
        settings: `field=value` each; `block.field=value` for a field in a block. The last value of
            a field counts. All values of a repeated field count; together they replace the file's.

    Raises:
        DefinitionError: there is no such field, or the value is not legal for it.
    """
    changed = deepcopy(param)
    replaced: set[tuple[str, ...]] = set()
    for setting in settings:
        path, field, value = _read(setting)
        for name in next((group for group in _ALTERNATIVES if path[0] in group), ()):
            if name != path[0]:
                changed.ClearField(name)
        if not field.is_repeated or path not in replaced:
            _holder(changed, path).ClearField(path[-1])
        replaced.add(path)
        changed.MergeFrom(value)
    return changed


def flag_text(setting: str) -> str:
    """Return a setting as on a command line: `--max_iter=5`, `--set base_lr=0.1`."""
    name, equals, _ = setting.partition("=")
    return f"--{setting}" if equals and name.strip() in OWN_FLAGS else f"--set {setting}"


def field_of(setting: str) -> str:
    """Return the top-level field that a setting changes."""
    return setting.partition("=")[0].partition(".")[0].strip()


def changes(before: SolverParameter, after: SolverParameter, settings: Iterable[str]) -> str:
    """Return a description of the changed settings for the log."""
    names = dict.fromkeys(setting.partition("=")[0].strip() for setting in settings)
    parts = []
    for name in names:
        path = tuple(name.split("."))
        old = _value_text(before, path)
        parts.append(
            f"{name}: {_value_text(after, path)} ({f'file: {old}' if old else 'not in the file'})"
        )
    return ", ".join(parts)


def _read(setting: str) -> tuple[tuple[str, ...], FieldDescriptor, SolverParameter]:
    """Return the path of a setting, its field, and a solver with only this field set."""
    name, equals, text = (part.strip() for part in setting.partition("="))
    source = flag_text(setting)
    if not equals or not name:
        raise DefinitionError("expected FIELD=VALUE, such as base_lr=0.1", source=source)
    path = tuple(name.split("."))
    field = _field(path, source)
    if not text:
        raise DefinitionError(f"no value for {name}", source=source)
    if text != escaped(text):  # a name of a file, as the shell has it
        raise DefinitionError(
            f"the value of {name} must be UTF-8 text, as all of a prototxt", source=source
        )
    if field.message_type is not None:
        block = text if text.startswith(("{", "[")) else f"{{ {text} }}"
        body = f"{path[-1]} {block}" if block.startswith("{") else f"{path[-1]}: {block}"
    else:
        body = f"{path[-1]}: {_quoted_value(field, text)}"
    for outer in reversed(path[:-1]):
        body = f"{outer} {{ {body} }}"
    value = SolverParameter()
    try:
        parse(body, value, source=source)
    except DefinitionError as error:
        raise DefinitionError(error.message, source=source) from error
    inner: Message = value
    for name in path:
        if [found.name for found, _ in inner.ListFields()] not in ([name], []):
            raise DefinitionError(f"expected one value for {name}", source=source)
        inner = getattr(inner, name) if name != path[-1] else inner
    return path, field, value


def _field(path: Sequence[str], source: str) -> FieldDescriptor:
    descriptor = cast(Descriptor, SolverParameter.DESCRIPTOR)
    for index, name in enumerate(path):
        field = descriptor.fields_by_name.get(name)
        if field is None:
            near = nearest_field(name, descriptor)
            hint = (
                f"did you mean '{near}'?"
                if near
                else f"it has {listing(sorted(descriptor.fields_by_name))}"
            )
            raise DefinitionError(
                f"unknown field '{name}' in {descriptor.name}; {hint}", source=source
            )
        if index == len(path) - 1:
            return field
        if field.message_type is None or field.is_repeated:
            raise DefinitionError(
                f"'{name}' has no fields that can be set one by one", source=source
            )
        descriptor = field.message_type
    raise AssertionError("a path has a name")


def _quoted_value(field: FieldDescriptor, text: str) -> str:
    strings = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    if not strings or is_quoted(text) or (field.is_repeated and text.startswith("[")):
        return text
    return f'"{text_encoding.CEscape(text.encode(), as_utf8=True)}"'


def _holder(message: Message, path: Sequence[str]) -> Message:
    """Return the message that holds the last field of a path."""
    for name in path[:-1]:
        message = getattr(message, name)
    return message


def _value_text(param: SolverParameter, path: Sequence[str]) -> str:
    """Return the value at a path as text on one line; empty if it is not set."""
    found = next(
        (pair for pair in _holder(param, path).ListFields() if pair[0].name == path[-1]), None
    )
    if found is None:
        return ""
    field, value = found
    if field.message_type is not None:
        return "{...}"
    return ", ".join(
        _scalar_text(field, item) for item in (value if field.is_repeated else [value])
    )


def _scalar_text(field: FieldDescriptor, value: object) -> str:
    if field.enum_type is not None and isinstance(value, int):
        return field.enum_type.values_by_number[value].name
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
