"""What a launcher tells a shard: the first line of its standard input, and of each later start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDocument:
    """One shard of a start, as JSON (`json_fields.py`).

    Attributes:
        shard: its number, from 0.
        workers: how many join.
        address: where to listen; port 0: any free one.
        token: the secret that workers show, hexadecimal.
        keys: `Keyring.to_json`; empty: nothing is encrypted.
        trace: the file of a trace; empty: none.
    """

    shard: int
    workers: int
    address: str
    token: str = field(repr=False)
    keys: str = field(default="", repr=False)
    trace: str = ""
