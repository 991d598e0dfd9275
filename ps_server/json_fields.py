"""Frozen dataclasses as JSON objects: what launchers and agents send each other, records of jobs.

Bytes are UTF-8.

Law: pure. Every field is checked against its type, so what `value_of` returns has the types of its
class; the class itself checks ranges. Keys that are not its fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ps_server.errors import SpecError

_V = TypeVar("_V")
LATEST_S = 1e11
"""Numbers that are not whole are durations and times, in seconds."""
_Check = Callable[[object], Any]
"""Returns a field's value from JSON's; raises ValueError, TypeError or KeyError if it cannot be."""


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; `plain` encodes what they hold. Fields that do not
    compare are of the process.
    """
    return {field.name: getattr(value, field.name) for field in fields(value) if field.compare}


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


def value_of(kind: type[_V], found: object) -> _V:
    """Return the value of a dataclass from a JSON object.

    Raises:
        ValueError: it is not one; the text names the field of the innermost dataclass that does not
            fit. Or what the class raises.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.80} is not a {kind.__name__}")
    values = {}
    for name, (check, required) in _checks_of(kind).items():  # type: ignore[arg-type]  # it is hashable
        if name not in found:
            if not required:
                continue
            raise ValueError(f"{kind.__name__} has no {name}")
        try:
            values[name] = check(found[name])
        except SpecError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise SpecError(f"{kind.__name__} has {found[name]!r:.80} as its {name}") from error
    return kind(**values)


@cache
def _checks_of(kind: type) -> Mapping[str, tuple[_Check, bool]]:
    """Return the check of each field, and whether it has to be there."""
    hints = get_type_hints(kind)
    required = {
        each.name: each.default is each.default_factory is MISSING
        for each in fields(kind)
        if each.compare
    }
    return {name: (_check_of(hints[name]), needed) for name, needed in required.items()}


def _check_of(hint: Any) -> _Check:
    """Return the check of a field with this type."""
    arguments = get_args(hint)
    if isinstance(hint, UnionType):
        (some,) = (each for each in arguments if each is not NoneType)
        check = _check_of(some)
        return lambda value: None if value is None else check(value)
    if get_origin(hint) is tuple:
        if arguments[1] is ...:
            return partial(_all, _check_of(arguments[0]))
        return partial(_each, [_check_of(each) for each in arguments])
    if get_origin(hint) is Mapping:
        return partial(_by_name, arguments[0], _check_of(arguments[1]))
    if hint is float:
        return _seconds
    if hint is bytes:
        return _bytes
    if hint in (bool, int, str):
        return partial(_exactly, hint)
    if hint in (object, Any):
        return lambda value: value
    return hint if issubclass(hint, Enum) else partial(value_of, hint)


def _exactly(kind: type, value: object) -> object:
    if type(value) is not kind:
        raise TypeError
    return value


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(_exactly(str, value)).encode()


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < LATEST_S:
        raise TypeError
    return float(value)


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
