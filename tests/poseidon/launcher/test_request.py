"""Requests check their ranges, and make the settings of a job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.supervision.state import SignalEffect
from poseidon.errors import UsageError
from poseidon.exchange.compute_options import Arithmetic
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.launcher.request import (
    Balance,
    ExtractionRequest,
    JobRequest,
    LauncherKind,
    ScriptRequest,
    TrainRequest,
)


def test_only_an_exchange_that_chooses_takes_a_plan() -> None:
    plan = Path("exchange_plan.json")
    assert JobRequest(exchange_plan=plan).exchange_plan == plan
    others: tuple[dict[str, Any], ...] = (
        {"kind": ExchangeKind.HYBRID},
        {"staleness": 1},
        {"local_steps": 4},
    )
    for other in others:
        with pytest.raises(UsageError, match="--exchange_plan needs --exchange=auto"):
            JobRequest(exchange_plan=plan, exchange=ExchangeOptions(**other))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "--workers is 0; expected 1 or more"),
        ({"threads": 0}, "--threads=0: expected 1 or more"),
        ({"progress_interval": -1.0}, "--progress=every=-1"),
        ({"progress_interval": float("nan")}, "--progress=every=nan"),
        ({"return_timeout": -1.0}, "--return_timeout=-1: expected 0 seconds or more"),
        ({"ray_timeout": -1.0}, "--launcher=ray:timeout=-1: expected 0 seconds or more"),
        ({"clients": 2}, "--launcher=ray:clients is for --launcher=ray"),
        ({"servers": 1}, "--launcher=ray:servers is for --launcher=ray"),
        ({"launcher": LauncherKind.RAY, "clients": 0}, "--launcher=ray:clients=0"),
        ({"ray_address": "a:1"}, "--launcher=ray:address is for --launcher=ray"),
        (
            {"launcher": LauncherKind.RAY, "hostfile": "hosts", "servers": 1},
            "--hostfile and --launcher=ray:clients=N exclude each other: the machinefile names the clients",
        ),
        ({"stall_timeout": 0.0}, "--stall_timeout=0: expected more than 0 seconds"),
        ({"term_deadline": float("nan")}, "--term_deadline=nan: expected more than 0 seconds"),
    ],
)
def test_what_is_out_of_range(values: dict[str, Any], message: str) -> None:
    for kind in (JobRequest, TrainRequest):
        with pytest.raises(UsageError, match=message):
            kind(**values)


def test_a_script_chooses_16_bits_by_itself() -> None:
    assert ScriptRequest(precision=Arithmetic.TF32, deterministic=True).deterministic
    for values, message in (
        (
            {"precision": Arithmetic.BFLOAT16},
            r"--precision=bfloat16 is for Caffe's nets .*autocast",
        ),
        ({"channels_last": True}, r"--channels_last is for Caffe's nets .*channels_last"),
    ):
        with pytest.raises(UsageError, match=message):
            ScriptRequest(**values)


def test_float16_asks_all_workers() -> None:
    rounds = ExchangeOptions(local_steps=4, quorum=1)
    with pytest.raises(UsageError, match=r"--precision=float16 cannot be combined .*bfloat16"):
        TrainRequest(precision=Arithmetic.FLOAT16, exchange=rounds)
    assert TrainRequest(precision=Arithmetic.BFLOAT16, exchange=rounds).exchange.quorum == 1


def test_an_extraction_has_workers() -> None:
    with pytest.raises(UsageError, match="--workers is 0"):
        ExtractionRequest(workers=0)


def test_a_run_is_resumed_or_starts_from_a_model(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="--snapshot and --weights exclude each other"):
        TrainRequest(snapshot="a", weights=(tmp_path,))


def test_settings() -> None:
    request = JobRequest(stall_timeout=8.0, sighup_effect=SignalEffect.STOP)
    settings = request.supervision_settings()
    assert (settings.stall_timeout_s, settings.sighup_effect) == (8.0, SignalEffect.STOP)


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
