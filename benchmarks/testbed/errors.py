"""What can go wrong in a measurement, besides what it measures.

PoseidonError
└── TestbedError    no hosts can be made, or a process on one of them failed
"""

from __future__ import annotations

from poseidon.errors import PoseidonError


class TestbedError(PoseidonError):
    """One sentence: what cannot be done, and why."""

    __test__ = False  # not a case for pytest
