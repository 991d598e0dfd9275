"""What a script logs: what is refused, what is sent, and that nothing waits for a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import poseidon
from poseidon.engine import logged_values
from poseidon.engine.logged_values import MOST_NAMES, LoggedValues, check
from poseidon.errors import UsageError
from poseidon.exchange.device import Device, Event
from poseidon.torch.script_hooks import log_of_library

Sent = list[tuple[int, Mapping[str, float | None]]]


def logging() -> tuple[LoggedValues, Sent]:
    """Return a worker's values, and a list of what it sends."""
    sent: Sent = []

    def send(event: str, *, iteration: int, values: Mapping[str, float | None]) -> None:
        assert event == "logged"
        sent.append((iteration, values))

    return LoggedValues(send), sent


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"9": 1.0}, "the name '9'; expected up to 100 letters, digits and _ . / : - of ASCII"),
        ({"a b": 1.0}, "the name 'a b'"),
        ({"": 1.0}, "the name ''"),
        ({"ü": 1.0}, "the name 'ü'"),
        ({"x" * 101: 1.0}, "the name 'xxx"),
        ({"loss": "1"}, "loss=str; expected a real number, or a tensor of one element"),
        ({"loss": None}, "loss=NoneType"),
        ({"loss": [1.0]}, "loss=list"),
        ({"loss": 1j}, "loss=complex"),
        ({"loss": torch.ones(2, 3)}, r"loss=a tensor of torch.float32 and shape \(2, 3\)"),
        ({"loss": torch.ones((), dtype=torch.complex64)}, "loss=a tensor of torch.complex64"),
    ],
)
def test_what_cannot_be_logged_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(1, values)
    with pytest.raises(UsageError, match=message):
        logging()[0].log(1, values)
    with pytest.raises(UsageError, match=message):  # a process that trains alone
        poseidon.log(**values)


@pytest.mark.parametrize("iteration", [-1, 1.5, "1"])
def test_an_iteration_is_a_whole_number(iteration: Any) -> None:
    with pytest.raises(UsageError, match=r"iteration=.*; expected 0, 1, 2"):
        poseidon.log(iteration=iteration, loss=1.0)


def test_numbers_of_all_kinds_are_sent() -> None:
    logged, sent = logging()
    half = torch.tensor([0.5], dtype=torch.float16, requires_grad=True)
    logged.log(3, {"a": 1, "b": half, "c": torch.tensor(2), "d": math.nan, "e": 10**400})
    logged.log(3, {"f": torch.tensor(math.inf), "g/h.i-j:k": True})
    assert sent == [
        (3, {"a": 1.0, "b": 0.5, "c": 2.0, "d": None, "e": None}),
        (3, {"f": None, "g/h.i-j:k": 1.0}),
    ]


def test_a_doubling_of_the_iterations_has_512_points() -> None:
    logged, sent = logging()
    for iteration in range(1, 8193):
        logged.log(7 * iteration, {"loss": 0.0})
    numbers = [iteration // 7 for iteration, _ in sent]
    assert numbers[:1024] == list(range(1, 1025))
    assert numbers[1024:1027] == [1025, 1027, 1029]
    assert len(numbers) == 1024 + 3 * 512
    assert numbers[-1] == 8185
    changed = torch.tensor(0.5)
    logged.log(7 * 8193, {"accuracy": 1.0})
    logged.log(7 * 8194, {"loss": changed})
    changed.zero_()
    logged.close()
    logged.close()
    assert sent[-2:] == [(7 * 8193, {"accuracy": 1.0}), (7 * 8194, {"loss": 0.5})], "the last ones"


def test_seldom_names_and_many_values_of_one_iteration() -> None:
    logged, sent = logging()
    for iteration in range(5000):
        logged.log(iteration, {"loss": 0.0})
    sent.clear()
    logged.log(4999, {"accuracy": 0.5})
    assert sent == [(4999, {"accuracy": 0.5})], "a name is counted by itself"
    for _ in range(10_000):
        logged.log(5000, {"val_loss": 1.0})
    assert 1024 < len(sent) < 4000


def test_names_are_bounded_and_a_library_does_not_notice() -> None:
    logged, sent = logging()
    logged.log(1, {f"n{number}": 0.0 for number in range(MOST_NAMES)})
    with pytest.raises(UsageError, match=f"at most {MOST_NAMES} names; 'more'"):
        logged.log(1, {"more": 1.0})
    sent.clear()
    given = {"more": 1.0, "epoch": 2, "eval_runtime": 0.1, "a b": 1, "text": "x", "n1": 2.0}
    log_of_library(logged.log, 2, given)
    assert sent == [(2, {"n1": 2.0})]


def test_a_value_on_a_device_is_sent_once_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copy:
        ended = False

        def query(self) -> bool:
            return self.ended

        def synchronize(self) -> None:
            self.ended = True

    copies = [Copy(), Copy(), Copy()]
    given = iter(copies)

    class Late(Device):
        is_host = False

        def event(self) -> Event:
            return next(given)

    late = Late()
    monkeypatch.setattr(logged_values, "device_of", lambda _: late)
    logged, sent = logging()
    for iteration in range(3):
        logged.log(iteration, {"loss": torch.tensor(0.5)})
    assert sent == []
    copies[0].ended = True
    logged.send_copied()
    assert [iteration for iteration, _ in sent] == [0]
    logged.close()
    assert [iteration for iteration, _ in sent] == [0, 1, 2]
    assert all(copy.ended for copy in copies)


@pytest.mark.needs("gpu")
def test_logging_does_not_wait_for_a_gpu() -> None:
    logged, sent = logging()
    logged.log(0, {"loss": torch.ones((), device="cuda")})
    torch.cuda.synchronize()
    logged.send_copied()
    assert sent == [(0, {"loss": 1.0})]
    with torch.cuda.stream(torch.cuda.Stream()):
        value = torch.ones((), device="cuda")
        torch.cuda._sleep(2_000_000_000)
        logged.log(1, {"loss": value * 3})
        value.zero_()
    assert len(sent) == 1, "the call has waited for the device"
    logged.close()
    assert sent[1] == (1, {"loss": 3.0})
