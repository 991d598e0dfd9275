"""The value of --balance."""

from __future__ import annotations

import argparse

import pytest

from poseidon.errors import UsageError
from poseidon.launcher.balance import Balance


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,0.5", Balance(speeds=(1.0, 0.5))),
        ("2", Balance(speeds=(2.0,))),
        ("auto", Balance(measured=True)),
        ("AUTO", Balance(measured=True)),
    ],
)
def test_a_balance_is_read(text: str, expected: Balance) -> None:
    assert Balance.read(text) == expected


@pytest.mark.parametrize("text", ["", "1,", "0,1", "-1", "nan", "inf", "fast", "1;2"])
def test_what_is_no_balance(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected the speed of each client, as"):
        Balance.read(text)


def test_each_client_has_a_speed() -> None:
    assert Balance().of_clients([0, 3]) == {}
    assert Balance(speeds=(1.0, 0.5)).of_clients([0, 3]) == {0: 1.0, 3: 0.5}
    with pytest.raises(UsageError, match=r"has 2 speeds, and this job has 3 clients .* one for"):
        Balance(speeds=(1.0, 0.5)).of_clients([0, 1, 2])
