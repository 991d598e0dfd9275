"""Error messages for prototxt text that does not parse, in terms of the schema.

Law: `google.protobuf.text_format` decides whether text is legal; this module only finds the reason
and the location. It walks the tokens along the message's descriptor and stops at the first mistake.
A message names the setting, the block, what was found, and the nearest legal name.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from poseidon.caffe.proto.branches import of_block, with_block
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.tokens import Token, scan, settings
from poseidon.caffe.proto.values import (
    is_closed,
    is_quoted,
    listing,
    nearest_field,
    problem,
    quoted,
)

_CLOSER = {"{": "}", "<": ">"}
_SOLVER = cast(Descriptor, SolverParameter.DESCRIPTOR)
_NET = cast(Descriptor, NetParameter.DESCRIPTOR)
_LAYERS = ("LayerParameter", "V1LayerParameter")

# Settings of the other layer format or of a branch, and what to write here.
_OTHER_FORMAT = {
    ("DenseImageDataParameter", "label_divide_factor"): "ENet's branch divides the labels by it; "
    "divide the values in the label pictures, which are the numbers of classes",
    ("SolverParameter", "stepearly"): "it is of a branch of Caffe that lowers the rate when the "
    'test\'s score stops rising; write lr_policy: "multistep" with a stepvalue for each step',
    ("LayerParameter", "blobs_lr"): "in a `layer` block write param { lr_mult: ... }",
    ("LayerParameter", "weight_decay"): "in a `layer` block write param { decay_mult: ... }",
    ("LayerParameter", "blob_share_mode"): "in a `layer` block write param { share_mode: ... }",
    ("V1LayerParameter", "phase"): "in a `layers` block write include { phase: ... }",
}
_OF_BRANCHES = {
    ("type", "CROP"): (
        ("V1LayerParameter",),
        "the layer type CROP is of longjon's branch of Caffe, which computes the offset; upgrade "
        "the other layers with `poseidon upgrade_net_proto_text`, and write layer { type: "
        '"Crop" crop_param { axis: 2 offset: N } }, with N of caffe.coord_map.crop',
    ),
    ("device_id", "["): (
        ("SolverParameter",),
        "device_id takes one number; a list is of CUHK's branch of Caffe: leave it out, and train "
        "with --gpu=0,1",
    ),
}
"""Values that a branch takes: the message types that have the setting, and what to write here."""
_OTHER_FILE = {
    "SolverParameter": "this is a net definition; a solver is expected, the file with net: ... "
    "and base_lr: ...",
    "NetParameter": "this is a solver definition; a net definition is expected, the file with the "
    "layers",
}
"""The error for a file whose settings mostly belong to the other kind."""
_OTHER_SYNTAX = {
    "/": "; a comment begins with #",
    "{": "; prototxt has no braces around the file and no quotes around names",
    "=": "; a setting is written name: value",
}
_CONTENT = re.compile(r"""["']([^\s"':{}]+)\s+[^"']*[:{]""")
"""A string that contains the settings after it, because its closing quote is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionMistake:
    """A mistake: the message without the location, and the location; line and column count from
    1.
    """

    message: str
    line: int
    column: int


def diagnose(text: str, descriptor: Descriptor) -> DefinitionMistake | None:
    """Return the first mistake in `text` as a message of type `descriptor`, or None if it has none."""
    walk = _Walk(text, descriptor)
    try:
        walk.run()
    except _Found as found:
        return walk.missing_quote(found.mistake) or found.mistake
    return None


class _Found(Exception):
    """The exception that ends the walk at the first mistake."""

    def __init__(self, message: str, token: Token) -> None:
        super().__init__(message)
        self.mistake = DefinitionMistake(message=message, line=token.line, column=token.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A message being read: the start of its block and the settings so far."""

    descriptor: Descriptor
    head: Token
    seen: dict[str, Token] = field(default_factory=dict)


class _Walk:
    """One pass over the tokens; `run` returns at the end of legal text and raises `_Found`
    otherwise.
    """

    def __init__(self, text: str, descriptor: Descriptor) -> None:
        self._tokens = list(scan(text))
        self._lines = text.split("\n")
        self._at = 0
        self._frames = [_Frame(descriptor=descriptor, head=Token("", 0, 0, False))]
        # The first block whose closing brace has a different indentation than its head. If a brace
        # is missing, it is more often missing here than in the block that is open at the end.
        self._suspect: _Frame | None = None

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def run(self) -> None:
        while self._token.text:
            self._setting()

    def missing_quote(self, mistake: DefinitionMistake) -> DefinitionMistake | None:
        """Return the mistake that caused `mistake` if a string on its line lacks the closing
        quote, else None.
        """
        strings = [
            token for token in self._tokens if token.line == mistake.line and is_quoted(token.text)
        ]
        if not strings or is_closed(strings[-1].text):
            return None
        for token in strings[:-1]:
            if found := _CONTENT.match(token.text):
                quote = token.text[0]
                message = f"the string {quote}{found[1]} has no closing quote; write {quote}{found[1]}{quote}"
                return DefinitionMistake(message=message, line=token.line, column=token.column)
        if strings[-1].column <= mistake.column:
            return None
        message = f"a string on this line has no closing quote; the last one is {quoted(strings[-1].text)}"
        return DefinitionMistake(message=message, line=mistake.line, column=strings[0].column)

    def _next(self) -> Token:
        token = self._token
        self._at += 1
        return token

    def _try(self, text: str) -> bool:
        found = self._token.text == text
        self._at += found
        return found

    def _setting(self) -> None:
        frame = self._frames[-1]
        name = self._next()
        if not (name.is_word or name.text[:1].isdigit()):
            self._not_a_name(name)
        setting = frame.descriptor.fields_by_name.get(name.text)
        if setting is None:
            raise _Found(self._unknown(frame, name), name)
        if not self._try(":") and setting.message_type is None:
            self._no_colon(setting)
        if setting.is_repeated and self._try("["):
            self._list(setting, name)
        else:
            self._value(setting, name)
        if not self._try(","):
            self._try(";")

    def _list(self, setting: FieldDescriptor, name: Token) -> None:
        if self._try("]"):
            return
        self._value(setting, name)
        while not self._try("]"):
            if not self._try(","):
                found = quoted(self._token.text)
                raise _Found(
                    f"the list of {setting.name} expects ',' or ']', found {found}", self._token
                )
            self._value(setting, name)

    def _value(self, setting: FieldDescriptor, name: Token) -> None:
        frame = self._frames[-1]
        first = frame.seen.setdefault(setting.name, name)
        twice = first is not name and not setting.is_repeated
        if setting.message_type is not None:
            self._block(setting.message_type, setting, name, twice)
            return
        self._scalar(setting)
        # Adjacent strings are concatenated, as in C.
        while is_quoted(self._token.text) and _takes_string(setting):
            self._scalar(setting)
        if twice:
            raise _Found(_set_twice(frame, name, first), name)

    def _scalar(self, setting: FieldDescriptor) -> None:
        token = self._token
        wrong = problem(setting, self._bare(token) if _takes_string(setting) else token.text)
        branch = _OF_BRANCHES.get((setting.name, token.text))
        if wrong is not None and branch and self._frames[-1].descriptor.name in branch[0]:
            raise _Found(branch[1], token)
        if wrong is not None:
            raise _Found(
                f"{setting.name} in {self._frames[-1].descriptor.name}: {wrong}", self._token
            )
        self._next()

    def _bare(self, token: Token) -> str:
        """Return an unquoted value up to the next space, or a quoted token unchanged."""
        if is_quoted(token.text) or not token.text:
            return token.text
        found = re.match(r"[\w./~-]+", self._lines[token.line - 1][token.column - 1 :])
        return found.group() if found else token.text

    def _block(
        self, descriptor: Descriptor, setting: FieldDescriptor, name: Token, twice: bool
    ) -> None:
        closer = _CLOSER.get(self._token.text)
        if closer is None:
            found = quoted(self._token.text)
            raise _Found(
                f"{setting.name} is a block: expected '{{' after it, found {found}", self._token
            )
        if twice:
            frame = self._frames[-1]
            raise _Found(_set_twice(frame, name, frame.seen[setting.name]), name)
        self._next()
        frame = _Frame(descriptor=descriptor, head=name)
        self._frames.append(frame)
        while self._token.text != closer:
            if not self._token.text:
                self._unclosed("the end of the file")
            self._setting()
        self._watch_indentation(frame, self._next())
        self._frames.pop()

    def _no_colon(self, setting: FieldDescriptor) -> NoReturn:
        token = self._token
        if token.text in _CLOSER:
            raise _Found(
                f"{setting.name} takes a value, not a block: write {setting.name}: <value>", token
            )
        raise _Found(f"expected ':' after {setting.name}, found {quoted(token.text)}", token)

    def _not_a_name(self, token: Token) -> NoReturn:
        frame = self._frames[-1]
        if token.text in _CLOSER.values() and len(self._frames) == 1:
            raise _Found(
                f"this '{token.text}' closes nothing: there is one too many here or above", token
            )
        where = f"in {frame.descriptor.name}" if frame.head.text else "in the file"
        hint = _OTHER_SYNTAX.get(token.text, "")
        raise _Found(
            f"expected the name of a setting {where}, found {quoted(token.text)}{hint}", token
        )

    def _unknown(self, frame: _Frame, name: Token) -> str:
        legal = sorted(frame.descriptor.fields_by_name)
        if len(self._frames) == 1 and self._is_of_the_other_kind(frame.descriptor):
            return _OTHER_FILE[frame.descriptor.name]
        if comma := self._decimal_comma(name):
            return comma
        message = f"unknown field '{name.text}' in {frame.descriptor.name}"
        if hint := _OTHER_FORMAT.get((frame.descriptor.name, name.text)):
            return f"{message}; {hint}"
        if any(name.text in outer.descriptor.fields_by_name for outer in self._frames[:-1]):
            if name.text in self._frames[0].descriptor.fields_by_name and self._opens_block():
                self._unclosed(f"'{name.text}' in line {name.line}")
            head = frame.head
            return f"{message}; is the '}}' of '{head.text}' (line {head.line}) missing before it?"
        if frame.descriptor.name in _LAYERS and (kind := self._unknown_type(frame)):
            return with_block(kind, name.text)
        if frame.descriptor.name in _LAYERS and (branch := of_block(name.text)):
            return f"{message}; {branch}"
        if near := nearest_field(name.text, frame.descriptor):
            return f"{message}; did you mean '{near}'?"
        return f"{message}; it takes {listing(legal)}"

    def _unknown_type(self, frame: _Frame) -> str:
        """Return the type of the layer whose block is being read if no layer has it; else an empty
        string.
        """
        if frame.head not in self._tokens:  # the file is the layer itself
            return ""
        at, depth = self._tokens.index(frame.head), 0
        for token, colon, value in zip(
            self._tokens[at:], self._tokens[at + 1 :], self._tokens[at + 2 :], strict=False
        ):
            depth += (token.text in _CLOSER) - (token.text in _CLOSER.values())
            if token.text in _CLOSER.values() and depth == 0:
                break
            if depth == 1 and token.text == "type" and colon.text == ":" and is_quoted(value.text):
                kind = value.text[1:-1]
                own = {name.replace("_", "") for name in frame.descriptor.fields_by_name}
                known = f"{kind.lower()}param" in own or kind in _known_types()
                return "" if known else kind
        return ""

    def _is_of_the_other_kind(self, descriptor: Descriptor) -> bool:
        """Return whether most settings of a solver file belong to a net, or vice versa."""
        kinds = [kind.name for kind in (_SOLVER, _NET)]
        if descriptor.name not in kinds:
            return False
        other = _NET if descriptor.name == _SOLVER.name else _SOLVER
        names = {
            setting.path[0]
            for setting in settings("\n".join(self._lines))
            if len(setting.path) == 1
        }
        own = names & set(descriptor.fields_by_name)
        return len(names & set(other.fields_by_name)) > len(own)

    def _decimal_comma(self, name: Token) -> str:
        """Return the message for a decimal comma such as 0,01; empty for anything else."""
        before = self._tokens[max(0, self._at - 3) : self._at - 1]
        if (
            len(before) < 2
            or before[1].text != ","
            or not name.text.isdigit()
            or not before[0].text.isdigit()
        ):
            return ""
        if name.line != before[0].line or name.column != before[0].column + len(before[0].text) + 1:
            return ""
        whole, rest = before[0].text, name.text
        if len(rest) == 3 and whole != "0":
            return f"a comma in {whole},{rest}; write {whole}{rest}, or {whole}.{rest}"
        return f"a decimal comma in {whole},{rest}; write {whole}.{rest}"

    def _opens_block(self) -> bool:
        return self._token.text in _CLOSER

    def _unclosed(self, before: str) -> NoReturn:
        frame = self._suspect or self._frames[-1]
        head = frame.head
        raise _Found(
            f"the '{{' of '{head.text}' in line {head.line} is not closed before {before}", head
        )

    def _watch_indentation(self, frame: _Frame, closer: Token) -> None:
        head_line, closer_line = self._lines[frame.head.line - 1], self._lines[closer.line - 1]
        if closer_line.lstrip()[:1] != closer.text or self._suspect is not None:
            return
        if closer.line != frame.head.line and _indent(head_line) != _indent(closer_line):
            self._suspect = frame


def _known_types() -> frozenset[str]:
    """Return the types of all layers. By name, because those packages import this one."""
    importlib.import_module("poseidon.caffe.layers")
    registry: Any = importlib.import_module("poseidon.caffe.layers.registry")
    known: frozenset[str] = registry.known_types()
    return known


def _takes_string(setting: FieldDescriptor) -> bool:
    return setting.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _set_twice(frame: _Frame, name: Token, first: Token) -> str:
    return f"'{name.text}' is set twice in {frame.descriptor.name}, first in line {first.line}; it takes one value"


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
