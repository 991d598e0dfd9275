"""Frozen dataclasses as plain values: what launchers and agents send each other, records of jobs,
the stores that workers describe to shards.

In JSON one is an object, and bytes are UTF-8. In msgpack one is a list of its fields, in order.

Law: pure. Every field is checked against its type, so what `value_of` returns has the types of its
class; the class itself checks ranges. A field named `..._s` is of seconds, and is not negative. Keys that are not its fields are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ps_server.errors import SpecError

_V = TypeVar("_V")
_Check = Callable[[object], Any]
"""Returns a field's value from JSON's; raises ValueError, TypeError or KeyError if it cannot be."""

_TEXTS: dict[str, Any] = {}
"""Classes by name whose values are texts: `str` makes one, and `parse` of the class reads it."""


def as_text(kind: type[_V]) -> type[_V]:
    """Let the values of a class be texts; a decorator. Other modules need not import it."""
    _TEXTS[kind.__name__] = kind
    return kind


def fields_of(value: Any, kind: type | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass by name, or those that it has from a class that it extends;
    `plain` encodes what they hold. Fields that do not compare are of the process.
    """
    of = fields(kind or value)
    return {field.name: getattr(value, field.name) for field in of if field.compare}


def plain(value: object) -> object:
    """Return what JSON has for a value that it does not know: see `default` of `json.dumps`."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return value.decode()
    assert is_dataclass(value), value
    return fields_of(value)


def listed(value: object) -> object:
    """Return what msgpack has for a value that it does not know: see `default` of `msgpack.packb`."""
    if type(value).__name__ in _TEXTS:
        return str(value)
    found = plain(value)
    return list(found.values()) if isinstance(found, dict) else found


def value_of(kind: type[_V], found: object) -> _V:
    """Return the value of a dataclass from an object of JSON, or a list of msgpack.

    Raises:
        ValueError: it is not one; the text names the field of the innermost dataclass that does not
            fit. Or what the class raises.
    """
    checks = _checks_of(kind)  # type: ignore[arg-type]  # it is hashable
    if isinstance(found, list) and len(found) == len(checks):
        found = dict(zip(checks, found, strict=True))
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.80} is not a {kind.__name__}")
    values = {}
    for name, (check, required) in checks.items():
        if name not in found:
            if not required:
                continue
            raise ValueError(f"{kind.__name__} has no {name}")
        try:
            values[name] = check(found[name])
        except SpecError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise SpecError(f"{kind.__name__} has {found[name]!r:.80} as its {name}") from error
    return kind(**values)


@cache
def _checks_of(kind: type) -> Mapping[str, tuple[_Check, bool]]:
    """Return the check of each field, and whether it has to be there."""
    hints = get_type_hints(kind, localns=_TEXTS)
    required = {
        each.name: each.default is each.default_factory is MISSING
        for each in fields(kind)
        if each.compare
    }
    return {
        name: (_check_of(hints[name], _seconds if name.endswith("_s") else _finite), needed)
        for name, needed in required.items()
    }


def _check_of(hint: Any, number: _Check) -> _Check:
    """Return the check of a field with this type, whose floats `number` checks."""
    arguments = get_args(hint)
    if isinstance(hint, UnionType):
        (some,) = (each for each in arguments if each is not NoneType)
        check = _check_of(some, number)
        return lambda value: None if value is None else check(value)
    if get_origin(hint) is tuple:
        if arguments[1] is ...:
            return partial(_all, _check_of(arguments[0], number))
        return partial(_each, [_check_of(each, number) for each in arguments])
    if get_origin(hint) is Mapping:
        return partial(_by_name, arguments[0], _check_of(arguments[1], number))
    if hint is float:
        return number
    if hint is bytes:
        return _bytes
    if hint is int:
        return _whole
    if hint in (bool, str):
        return partial(_exactly, hint)
    if hint in (object, Any):
        return lambda value: value
    if hint in _TEXTS.values():
        return lambda value: hint.parse(_exactly(str, value))
    return hint if issubclass(hint, Enum) else partial(value_of, hint)


def _exactly(kind: type, value: object) -> object:
    if type(value) is not kind:
        raise TypeError
    return value


def _whole(value: object) -> object:
    if type(value) is not int or not -(2**63) <= value < 2**63:  # as numbers of msgpack are
        raise TypeError
    return value


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(_exactly(str, value)).encode()


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _seconds(value: object) -> float:
    found = _finite(value)
    if found < 0:
        raise ValueError
    return found


def _all(check: _Check, value: object) -> tuple[Any, ...]:
    return tuple(map(check, _exactly(list, value)))  # type: ignore[call-overload]


def _each(checks: list[_Check], value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(check(one) for check, one in zip(checks, value, strict=True))


def _by_name(key: type, check: _Check, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return {key(name): check(one) for name, one in value.items()}
