"""The address of the page, as the command prints it."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn")
from poseidon.dashboard.serve import page_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8300/"),
        ("node0", "http://node0:8300/"),
        ("fd00::8", "http://[fd00::8]:8300/"),
        ("0.0.0.0", f"http://{socket.gethostname()}:8300/"),
        ("::", f"http://{socket.gethostname()}:8300/"),
    ],
)
def test_an_address_that_a_browser_can_open(host: str, address: str) -> None:
    assert page_address(host, 8300) == address
