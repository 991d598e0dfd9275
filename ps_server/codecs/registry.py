"""The names of codecs.

    int8, topk:0.01             a codec: its name, and its parameters in the order of its fields
    topk:0.01/int8, int8/none   a pair: of gradients, and of values; without `/` both are the same

Law: no text of a peer imports anything but what is installed as a codec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import TypeVar, get_type_hints

from ps_server.codecs.base import Codec
from ps_server.codecs.blocks import Int4, Int8, Sign
from ps_server.codecs.segments import RandomK, TopK
from ps_server.errors import SpecError
from ps_server.json_fields import as_text

NO_CODEC = "none"
ENTRY_POINTS = "ps_server.codecs"
"""The group of entry points in which an installed package declares modules that register codecs,
each by the codec's name.
"""

C = TypeVar("C", bound=type[Codec])
_CODECS: dict[str, type[Codec]] = {}


def register_codec(codec: C) -> C:
    """Give a codec its name; a decorator of its class.

    Raises:
        SpecError: the name is not one of a codec, or it is taken.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", codec.name) or codec.name == NO_CODEC:
        raise SpecError(
            f"'{codec.name:.60}' is not a name of a codec; expected lower-case letters, digits and _"
        )
    if codec.name in _CODECS:
        raise SpecError(f"there are two codecs with the name '{codec.name}'; rename one of them")
    _CODECS[codec.name] = codec
    return codec


for _codec in (Int8, Int4, Sign, TopK, RandomK):
    register_codec(_codec)


def find(name: str) -> type[Codec] | None:
    """Return the codec of a name; None: there is none, also in no installed package."""
    if name not in _CODECS:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            point.load()
    return _CODECS.get(name)


def names() -> list[str]:
    """Return how each codec is written, such as `topk:FRACTION`."""
    return [_written(codec) for codec in _CODECS.values()]


def codec_of(text: str) -> Codec:
    """Return the codec of a text such as `int8` or `topk:0.01`.

    Raises:
        SpecError: it is not a codec.
    """
    name, *words = text.split(":")
    codec = find(name)
    if codec is None:
        raise SpecError(f"'{text:.60}' is not a codec; expected {', '.join(names())}")
    types = get_type_hints(codec)
    parameters = [types[one.name] for one in fields(codec)]
    try:
        values = [kind(word) for kind, word in zip(parameters, words, strict=True)]
    except ValueError:
        raise SpecError(f"'{text:.60}' is not a codec; expected {_written(codec)}") from None
    return codec(*values)


def _written(codec: type[Codec]) -> str:
    return ":".join([codec.name, *(one.name.upper() for one in fields(codec))])


@as_text
@dataclass(frozen=True, slots=True)
class CodecPair:
    """The lossy codecs of a table, one for each direction; at least one of them.

    Args:
        gradients: of what workers push; None: the store's precision.
        values: of what the shards send back; None: the store's precision.
    """

    gradients: Codec | None
    values: Codec | None

    def __post_init__(self) -> None:
        if self.gradients is None and self.values is None:
            raise SpecError(
                f"{NO_CODEC}/{NO_CODEC} is not a codec; expected one for gradients or for values"
            )

    def __str__(self) -> str:
        if self.gradients == self.values:
            return str(self.gradients)
        return f"{self.gradients or NO_CODEC}/{self.values or NO_CODEC}"

    @classmethod
    def parse(cls, text: str) -> CodecPair:
        """Return the codecs of a text: `topk:0.01/int8` for gradients and values,
        or `int8` for both; `none` for neither.

        Raises:
            SpecError: it is not a pair, or `none` twice.
        """
        gradients, slash, values = text.partition("/")
        found = [
            None if name == NO_CODEC else codec_of(name)
            for name in (gradients, values if slash else gradients)
        ]
        return cls(*found)
