"""The variables that a process is started with."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys

import pytest

from ps_server.process_environment import collector_paused, environment


def test_the_user_says_how_threads_wait_but_not_how_many_they_are() -> None:
    given = {"OMP_WAIT_POLICY": "ACTIVE", "MKL_CBWR": "", "OMP_NUM_THREADS": "7", "HOME": "/root"}
    found = environment(2, given)
    assert found["OMP_WAIT_POLICY"] == "ACTIVE"
    assert found["MKL_CBWR"] == "AUTO,STRICT"
    assert {found[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"2"}
    assert "HOME" not in found


@pytest.mark.parametrize(("hard", "expected"), [(300, 300), (200, 200), (100, 100)])
def test_a_process_opens_as_many_files_as_its_user_may(hard: int, expected: int) -> None:
    program = (
        "import resource as r; from ps_server.process_environment import raise_file_limit; "
        "raise_file_limit(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == f"({expected}, {hard})\n"


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
