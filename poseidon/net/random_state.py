"""The state of several random generators as bytes: a run of (length, bytes), one for each."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from poseidon.errors import SnapshotError

LENGTH = struct.Struct("<I")


def pack_states(generators: Sequence[torch.Generator]) -> bytes:
    """Return the states, in order."""
    states = [generator.get_state().numpy().tobytes() for generator in generators]
    return b"".join(LENGTH.pack(len(state)) + state for state in states)


def unpack_states(generators: Sequence[torch.Generator], packed: bytes) -> None:
    """Put back what `pack_states` gave.

    Raises:
        SnapshotError: the states are of other generators, or of those of another kind of device.
    """
    parts, rest = [], packed
    while len(rest) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(rest)
        parts.append(rest[LENGTH.size : LENGTH.size + length])
        rest = rest[LENGTH.size + length :]
    lengths = [generator.get_state().numel() for generator in generators]
    if rest or [len(part) for part in parts] != lengths:
        raise SnapshotError(
            f"the random state is that of {len(parts)} layers ({len(packed)} bytes), expected that of the "
            f"{len(generators)} random layers of this net"
        )
    for generator, part in zip(generators, parts, strict=True):
        generator.set_state(torch.frombuffer(bytearray(part), dtype=torch.uint8))
