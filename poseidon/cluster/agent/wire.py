"""The wire format between a launcher and the agent on a host: a JSON object, then bytes.

    {"kind": "Put", "id": 3, "path": "/tmp/x/net.prototxt", "offset": 0}\n<content>

`kind` is the name of the message's class (`messages.py`), and the other keys are its fields, save
its field of bytes, if it has one: that follows the line as it is.

Law: pure. Every field is checked against its type, so what `decode` returns has the types of its
class. Either side closes the connection on anything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from poseidon.cluster.agent.messages import Report, Request

_M = TypeVar("_M")
LONGEST_S = 1e12
Check = Callable[[object], Any]
"""Returns the value of a field from JSON's.

Raises ValueError, TypeError or KeyError where it has a different type.
"""


class WireError(ValueError):
    """What came is not a message of this protocol."""


class Codec(Generic[_M]):
    """Encodes and decodes messages.

    Args:
        kinds: their classes: frozen dataclasses.
    """

    def __init__(self, *kinds: type[_M]) -> None:
        self._checks = {kind.__name__: (kind, _fields(kind)) for kind in kinds}

    @property
    def kinds(self) -> frozenset[str]:
        """The names of the messages."""
        return frozenset(self._checks)

    def encode(self, message: _M) -> bytes:
        kind = type(message).__name__
        fields = {name: getattr(message, name) for name in self._checks[kind][1]}
        content = fields.pop("content", None)
        header = json.dumps({"kind": kind, **fields}, default=_plain).encode()
        return header if content is None else b"%b\n%b" % (header, content)

    def decode(self, encoded: bytes) -> _M:
        """Decode a message.

        Raises:
            WireError: it is not one of these.
        """
        header, _, content = encoded.partition(b"\n")
        try:
            fields = json.loads(header)
            kind, checks = self._checks[fields["kind"]]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise WireError(f"not a message: {encoded[:80]!r}") from error
        return _build(kind, checks, {**fields, "content": content})


def _fields(kind: type) -> dict[str, Check]:
    hints = get_type_hints(kind)
    return {name: _check_of(hints[name]) for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


def _build(kind: type[_M], checks: Mapping[str, Check], fields: object) -> _M:
    if not isinstance(fields, dict):
        raise WireError(f"{fields!r:.80} is not a {kind.__name__}")
    values = {}
    for name, check in checks.items():
        try:
            values[name] = check(fields[name])
        except (ValueError, TypeError, KeyError) as error:
            raise WireError(
                f"{kind.__name__} has {fields.get(name)!r:.80} as its {name}"
            ) from error
    try:
        return kind(**values)
    except ValueError as error:
        raise WireError(f"{kind.__name__}: {error}") from error


def _check_of(hint: Any) -> Check:
    """Return the check of a field with this type."""
    if hint is bool:
        return _truth
    if hint is int:
        return _whole
    if hint is float:
        return _seconds
    if hint is str:
        return _text
    if hint is bytes:
        return _content
    if get_origin(hint) is tuple:
        return _texts
    if get_origin(hint) is Mapping:
        return _texts_by_name if get_args(hint)[1] is str else _object
    kind: type = hint
    return kind if issubclass(kind, Enum) else partial(_build, kind, _fields(kind))


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < LONGEST_S:
        raise TypeError
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _content(value: object) -> bytes:
    assert isinstance(value, bytes)  # `decode` has cut it off
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_text, value))


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _texts_by_name(value: object) -> Mapping[str, str]:
    return {name: _text(text) for name, text in _object(value).items()}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    assert is_dataclass(value) and not isinstance(value, type), value
    return asdict(value)


REQUESTS: Codec[Request] = Codec(*get_args(Request))
REPORTS: Codec[Report] = Codec(*get_args(Report))
