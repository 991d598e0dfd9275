"""Seeds of independent random streams, and the states of random generators as bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from poseidon.errors import SnapshotError

LENGTH = struct.Struct("<I")


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a seed of 63 bits that is a hash of `seed` and `path`, the same on all hosts and
    Python versions.

    >>> derive_seed(1, "blob", 0) == derive_seed(1, "blob", 0), derive_seed(1, "blob", 0) == derive_seed(1, "blob", 1)
    (True, False)
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def pack_states(generators: Sequence[torch.Generator]) -> bytes:
    """Serialize the states in order, each as its length and its bytes."""
    states = [generator.get_state().numpy().tobytes() for generator in generators]
    return b"".join(LENGTH.pack(len(state)) + state for state in states)


def unpack_states(generators: Sequence[torch.Generator], packed: bytes) -> None:
    """Restore states that `pack_states` returned.

    Raises:
        SnapshotError: the states belong to different generators or a different kind of device.
    """
    parts, rest = [], packed
    while len(rest) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(rest)
        parts.append(rest[LENGTH.size : LENGTH.size + length])
        rest = rest[LENGTH.size + length :]
    lengths = [generator.get_state().numel() for generator in generators]
    if rest or [len(part) for part in parts] != lengths:
        raise SnapshotError(
            f"the random state is of {len(parts)} layers ({len(packed)} bytes), and this net has "
            f"{len(generators)} random layers"
        )
    for generator, part in zip(generators, parts, strict=True):
        generator.set_state(torch.frombuffer(bytearray(part), dtype=torch.uint8))
