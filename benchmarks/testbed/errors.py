"""The error of a measurement.

PoseidonError
└── TestbedError    no hosts can be made, or a process on one of them failed
"""

from __future__ import annotations

from poseidon.errors import PoseidonError


class TestbedError(PoseidonError):
    """A measurement cannot be made; the text says why in one sentence."""

    __test__ = False  # not a case for pytest
