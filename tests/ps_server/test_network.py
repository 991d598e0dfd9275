"""The place of a worker in its network."""

from __future__ import annotations

import pytest

from ps_server.errors import SpecError
from ps_server.network import Network


def test_the_secret_is_in_no_repr() -> None:
    assert "abc" not in repr(Network(token=b"abc"))


@pytest.mark.parametrize(("host", "bare"), [("127.0.0.1", "127.0.0.1"), ("[fe80::1]", "fe80::1")])
def test_the_brackets_of_an_address_are_for_those_with_a_port(host: str, bare: str) -> None:
    assert Network(host=host).bare_host == bare


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_below_the_size(rank: int, size: int) -> None:
    with pytest.raises(SpecError, match=f"the rank is {rank} of {size} workers"):
        Network(rank=rank, size=size)
