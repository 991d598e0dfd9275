"""From flags to the values of a request; contradictions are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from poseidon.cli.main import parse_arguments
from poseidon.cli.requests import exchange_kind, job_request
from poseidon.cluster.supervision.state import SignalEffect
from poseidon.errors import UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.launcher.request import (
    Encrypt,
    LauncherKind,
    OnNan,
    ScriptRequest,
    ShownLogs,
    TrainRequest,
)


def parsed(*words: str, staleness: int = 0) -> argparse.Namespace:
    return parse_arguments(["run", f"--staleness={staleness}", *words, "script.py"])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), ExchangeKind.AUTO),
        (("--svb=true",), ExchangeKind.FACTORS),
        (("--svb=false",), ExchangeKind.SERVER),
        (("--svb=0",), ExchangeKind.SERVER),
        (("--exchange=allreduce",), ExchangeKind.ALLREDUCE),
        (("--exchange=local",), ExchangeKind.LOCAL),
        (("--exchange=svb", "--svb=true"), ExchangeKind.FACTORS),
        (("--exchange=ps", "--svb=no"), ExchangeKind.SERVER),
    ],
)
def test_kinds(words: tuple[str, ...], kind: ExchangeKind) -> None:
    assert exchange_kind(parsed(*words)) is kind


@pytest.mark.parametrize(
    "words", [("--exchange=ps", "--svb=true"), ("--exchange=allreduce", "--nosvb")]
)
def test_the_two_flags_may_not_contradict_each_other(words: tuple[str, ...]) -> None:
    with pytest.raises(
        UsageError, match=r"--svb=\w+ means --exchange=\w+, and --exchange=\w+ is asked for too"
    ):
        exchange_kind(parsed(*words))


@pytest.mark.parametrize(
    ("words", "staleness", "message"),
    [
        (("--exchange=allreduce",), 3, "--exchange=allreduce needs --staleness=0"),
        (
            ("--exchange=allreduce", "--wire_precision=float16"),
            0,
            "needs --wire_precision=float32, not float16",
        ),
        (("--bandwidth_mbps=40",), 0, "is for --consistency=SSPAggr, not SSPPush"),
        (("--exchange=ps", "--svb=true"), 0, "--svb=true means --exchange=svb"),
        (("--threads=0",), 0, "--threads=0: expected 1 or more"),
    ],
)
def test_contradictions(words: tuple[str, ...], staleness: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_request(ScriptRequest, parsed(*words, staleness=staleness))


@pytest.mark.parametrize(
    "words", [(), ("--exchange=local",), ("--exchange=ps", "--consistency=SSP")]
)
def test_what_may_be_together(words: tuple[str, ...]) -> None:
    assert job_request(ScriptRequest, parsed(*words, staleness=1)).exchange.staleness == 1


@pytest.mark.parametrize(
    ("words", "requested"),
    [
        ((), False),
        (("--exchange=local",), False),
        (("--svb=false",), False),
        (("--exchange=ps",), True),
    ],
)
def test_a_server_is_requested_by_the_name_of_an_exchange(
    words: tuple[str, ...], requested: bool
) -> None:
    assert job_request(ScriptRequest, parsed(*words)).server_requested is requested


def test_without_flags_a_request_has_its_defaults() -> None:
    argv = ["train", "--solver=a.prototxt"]
    expected = TrainRequest(argv=tuple(argv), solver=Path("a.prototxt"))
    assert job_request(TrainRequest, parse_arguments(argv)) == expected


def test_values_have_the_types_of_the_request() -> None:
    argv = [
        *(
            "train",
            "--solver=a",
            "--weights=b,c",
            "--stage=x,y",
            "--import=m, n",
            "--max_iter=3",
            "--on_nan=warn",
        ),
        *(
            "--progress=logs=all",
            "--launcher=ssh",
            "--ssh_config=config",
            "--encrypt=on",
            "--output=out",
        ),
        *("--sigint_effect=none", "--max_restarts=2"),
    ]
    assert job_request(TrainRequest, parse_arguments(argv)) == TrainRequest(
        argv=tuple(argv),
        solver=Path("a"),
        weights=(Path("b"), Path("c")),
        stage=("x", "y"),
        imports=("m", "n"),
        settings=("max_iter=3",),
        on_nan=OnNan.WARN,
        show_logs=ShownLogs.ALL,
        launcher=LauncherKind.SSH,
        ssh_config=Path("config"),
        encrypt=Encrypt.ON,
        output=Path("out"),
        sigint_effect=SignalEffect.NONE,
        max_restarts=2,
    )


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
        (
            "--exchange=ring",
            "expected one of auto, hybrid, ps, svb, allreduce, local, found 'ring'",
        ),
        ("--svb=maybe", "found 'maybe'"),
        ("--wire_precision=int8", "found 'int8'"),
        ("--consistency=BSP", "found 'BSP'"),
        ("--wait_free=perhaps", "expected true or false, found 'perhaps'"),
        ("--bandwidth_mbps=0", "found '0'"),
        ("--bandwidth_mbps=inf", "found 'inf'"),
        ("--bandwidth_mbps=fast", "found 'fast'"),
    ],
)
def test_no_such_value(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(word)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
