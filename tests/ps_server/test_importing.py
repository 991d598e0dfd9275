"""Imports without the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from ps_server.importing import collector_paused


def test_the_collector_is_as_before() -> None:
    with pytest.raises(ImportError), collector_paused():
        assert not gc.isenabled()
        raise ImportError("torch")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_garbage_is_looked_for_while_a_shard_starts() -> None:
    program = "import gc; gc.callbacks.append(lambda *_: found.append(1)); found = []; import ps_server; print(len(found), gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    count, enabled = done.stdout.split()
    assert int(count) < 20  # torch asks for a few by itself; without the pause there are hundreds
    assert enabled == "True"
