"""A real sshd on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.loopback_sshd import LoopbackSshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    server = LoopbackSshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()
