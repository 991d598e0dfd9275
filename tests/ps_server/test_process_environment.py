"""The variables that a process is started with."""

from __future__ import annotations

from ps_server.process_environment import environment


def test_the_user_says_how_threads_wait_but_not_how_many_they_are() -> None:
    given = {"OMP_WAIT_POLICY": "ACTIVE", "MKL_CBWR": "", "OMP_NUM_THREADS": "7", "HOME": "/root"}
    found = environment(2, given)
    assert found["OMP_WAIT_POLICY"] == "ACTIVE"
    assert found["MKL_CBWR"] == "AUTO,STRICT"
    assert {found[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"2"}
    assert "HOME" not in found
