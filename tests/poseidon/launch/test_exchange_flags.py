"""What the flags of an exchange ask for, and which of them cannot be together."""

from __future__ import annotations

import argparse

import pytest

from poseidon.cli.main import parse_words
from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.launch.exchange_flags import check_clients, exchange_kind, exchange_options


def parsed(*words: str, staleness: int = 0) -> argparse.Namespace:
    flags = parse_words(["run", *words, "script.py"])
    flags.table_staleness = staleness
    return flags


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), ExchangeKind.HYBRID),
        (("--svb=auto",), ExchangeKind.HYBRID),
        (("--svb=true",), ExchangeKind.FACTORS),
        (("--svb=false",), ExchangeKind.SERVER),
        (("--svb=0",), ExchangeKind.SERVER),
        (("--exchange=allreduce",), ExchangeKind.ALLREDUCE),
        (("--exchange=local",), ExchangeKind.LOCAL),
        (("--exchange=svb", "--svb=true"), ExchangeKind.FACTORS),
        (("--exchange=ps", "--svb=no"), ExchangeKind.SERVER),
        (("--exchange=hybrid", "--svb=auto"), ExchangeKind.HYBRID),
    ],
)
def test_kinds(words: tuple[str, ...], kind: ExchangeKind) -> None:
    assert exchange_kind(parsed(*words)) is kind


@pytest.mark.parametrize("words", [("--exchange=ps", "--svb=true"), ("--exchange=allreduce", "--svb=auto")])
def test_the_two_flags_may_not_contradict_each_other(words: tuple[str, ...]) -> None:
    with pytest.raises(
        UsageError, match=r"--svb=\w+ means --exchange=\w+, and --exchange=\w+ is asked for too"
    ):
        exchange_kind(parsed(*words))


@pytest.mark.parametrize(
    ("words", "workers", "staleness", "message"),
    [
        (("--exchange=local",), 2, 0, "--exchange=local is for one client; this job has 2"),
        (("--exchange=allreduce",), 2, 3, "--exchange=allreduce has no staleness"),
        (
            ("--exchange=allreduce", "--wire_precision=float16"),
            2,
            0,
            "sends float32; expected that, not float16",
        ),
        (("--client_bandwidth_mbps=40",), 2, 0, "is for --consistency_model=SSPAggr, not SSPPush"),
    ],
)
def test_contradictions(words: tuple[str, ...], workers: int, staleness: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_clients(exchange_options(parsed(*words, staleness=staleness)), workers)


@pytest.mark.parametrize(
    ("words", "workers"),
    [((), 2), (("--exchange=local",), 1), (("--exchange=ps", "--consistency_model=SSP"), 3)],
)
def test_what_may_be_together(words: tuple[str, ...], workers: int) -> None:
    options = exchange_options(parsed(*words, staleness=int("allreduce" not in words)))
    check_clients(options, workers)


@pytest.mark.parametrize(
    ("words", "wait_free", "trace"),
    [
        ((), True, False),
        (("--wait_free=false", "--trace"), False, True),
        (("--wait_free=TRUE", "--trace=false"), True, False),
    ],
)
def test_switches(words: tuple[str, ...], wait_free: bool, trace: bool) -> None:
    flags = parsed(*words)
    assert (flags.wait_free, flags.trace) == (wait_free, trace)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--exchange=ring", "expected one of hybrid, ps, svb, allreduce, local, found 'ring'"),
        ("--svb=maybe", "found 'maybe'"),
        ("--wire_precision=int8", "found 'int8'"),
        ("--consistency_model=BSP", "found 'BSP'"),
        ("--wait_free=perhaps", "expected true or false, found 'perhaps'"),
        ("--client_bandwidth_mbps=0", "found '0'"),
        ("--client_bandwidth_mbps=inf", "found 'inf'"),
        ("--client_bandwidth_mbps=fast", "found 'fast'"),
    ],
)
def test_no_such_value(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(word)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
