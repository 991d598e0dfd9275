"""What a launcher tells a shard: the first line of its standard input, and of each later start."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_server.keys import Keyring


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDocument:
    """One shard of a start, as JSON (`json_fields.py`).

    Attributes:
        shard: its number, from 0.
        workers: how many join.
        address: where to listen; port 0: any free one.
        token: the secret that workers show.
        keys: its own; None: nothing is encrypted.
        trace: the file of a trace; empty: none.
        supervised: whether a launcher sends commands.
    """

    shard: int
    workers: int
    address: str
    token: bytes = field(repr=False)
    keys: Keyring | None = None
    trace: str = ""
    supervised: bool = True
