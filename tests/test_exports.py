"""Public lists are sorted and say what is there."""

from __future__ import annotations

import types

import poseidon
import ps_server


def test_ps_server_lists_what_it_exports() -> None:
    names = [
        name
        for name, value in vars(ps_server).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(names) == ps_server.__all__


def test_poseidon_lists_what_it_exports() -> None:
    names = [
        name
        for name, value in vars(poseidon).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted([*names, "__version__"]) == sorted(poseidon.__all__)
    assert len(set(poseidon.__all__)) == len(poseidon.__all__)
