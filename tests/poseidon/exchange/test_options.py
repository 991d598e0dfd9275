"""Options travel whole from their flags to the store of each worker; an added one needs a field."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from poseidon.cli.jobs import job_request
from poseidon.cli.main import parse_arguments
from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.machinefile import parse_machinefile
from poseidon.engine.document import ScriptDocument, read_document
from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import (
    DEFAULT_OPTIONS,
    LOCAL_STEPS,
    ExchangeKind,
    ExchangeOptions,
    OnDivergence,
    check_virtual_workers,
)
from poseidon.flags.flag import Section, flags_of, option
from poseidon.launcher.processes import Start
from poseidon.launcher.request import Encrypt, ScriptRequest
from poseidon.launcher.site import Site
from poseidon.torch.script_job import ScriptJob
from ps_server import Consistency, Precision, json_fields
from ps_server.json_fields import fields_of, plain, value_of
from ps_server.protocol.virtual_workers import VirtualWorkers

ALL = ExchangeOptions(
    kind=ExchangeKind.SERVER,
    staleness=2,
    rows=3,
    consistency=Consistency.SSP_AGGR,
    precision=Precision.BFLOAT16,
    local_steps=16,
    outer_lr=0.5,
    outer_momentum=0.8,
    outer_nesterov=False,
    bandwidth_mbps=1.5,
    compress="none",
    wait_free=False,
    check_replicas=7,
    on_divergence=OnDivergence.MEND,
)
STREAMING = ExchangeOptions(
    local_steps=16, sync_fragments=2, sync_delay=3, sync_mix=0.25, compress="auto", loss_budget=0.02
)
QUORUM = ExchangeOptions(local_steps=16, quorum=2, quorum_grace=0.5)
"""In one of these every field has another value than its default; each excludes some of the
others.
"""


def arguments_of(options: ExchangeOptions) -> list[str]:
    values = json.loads(json.dumps(fields_of(options), default=plain))
    titles = [flag.title for flag in flags_of(ExchangeOptions)]
    return [
        f"{title}={str(values[entry.name]).lower()}"
        for title, entry in zip(titles, fields(options), strict=True)
    ]


def test_the_flags_of_all_fields_give_all_fields() -> None:
    for entry in fields(ALL):
        assert any(
            getattr(options, entry.name) != entry.default for options in (ALL, STREAMING, QUORUM)
        )
    for options in (ALL, STREAMING, QUORUM):
        arguments = [
            re.sub("ssp(aggr|push)", lambda name: f"SSP{name[1].title()}", argument)
            for argument in arguments_of(options)
            if argument not in ("--bandwidth_mbps=none", "--loss_budget=none")
        ]
        assert (
            job_request(ScriptRequest, parse_arguments(["run", *arguments, "script.py"])).exchange
            == options
        )
    assert (
        job_request(ScriptRequest, parse_arguments(["run", "script.py"])).exchange
        == DEFAULT_OPTIONS
    )


def test_the_page_has_the_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "local_steps.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:--)?(\w+)=[^|]*\|.*\| (\S+) \|$", page, re.MULTILINE)
    flags = {
        flag.name: flag for flag in flags_of(ExchangeOptions) if flag.section is Section.ROUNDS
    }
    assert {name for name, _ in rows} == flags.keys()
    assert len(flags) == 1 + len(LOCAL_STEPS)
    for name, default in rows:
        assert flags[name].read(default.replace("on", "true")) == flags[name].default


def test_a_document_carries_them() -> None:
    document = ScriptDocument(job="j", output="o", script="s.py", member=Membership(options=ALL))
    assert read_document(ScriptDocument, document.to_json()).member.options == ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(ExchangeOptions):
    """The options with one more field: all that an option needs until it acts."""

    compression: int = option(0, "level", Section.EXCHANGE, metavar="N")


class Received(Exception):
    """Ends `build_exchange` where the store is made."""


def test_an_added_option_needs_a_field_alone_to_reach_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("cli.jobs", "cli.parsers.job_flags", "exchange.membership"):
        monkeypatch.setattr(f"poseidon.{module}.ExchangeOptions", Extended)
    monkeypatch.setattr(json_fields, "_checks_of", json_fields._checks_of.__wrapped__)
    script = tmp_path / "script.py"
    script.touch()

    # The launcher: from the command line to the document of each worker.
    flags = parse_arguments(["run", "--compression=4", f"--output={tmp_path}", str(script)])
    hosts = parse_machinefile("0 127.0.0.1 0\n1 127.0.0.1 0\n", source="hosts")
    with closing(Site(hosts, LocalDialer())) as site:
        job = ScriptJob(job_request(ScriptRequest, flags), site)
        site.prepare(job.id, job.needs)
        start = Start.new(0, job.origin, job.plan, Encrypt.AUTO)
        lines = [job.spec(worker, start).first_line for worker in job.plan.workers]
    assert len(lines) == 2

    # The worker: from the line on its standard input to the specification of its store.
    def store_spec(*arguments: object, **_: object) -> NoReturn:
        (member,) = (each for each in arguments if isinstance(each, Membership))
        raise Received(member.options)

    monkeypatch.setattr("poseidon.exchange.server_exchange.store_spec", store_spec)
    for line in lines:
        member = read_document(ScriptDocument, line).member
        with pytest.raises(Received) as received:
            build_exchange(
                [Trained(name="w", tensor=torch.zeros(3))], ExchangeSettings(), member, tuple
            )
        assert received.value.args == (Extended(compression=4),)


def test_an_added_option_is_checked_as_all_others() -> None:
    options = Extended(compression=4)
    assert value_of(Extended, json.loads(json.dumps(fields_of(options), default=plain))) == options
    with pytest.raises(UsageError, match="--compression=-1: expected 0 or more"):
        Extended(compression=-1)


KINDS: dict[str, Any] = {"kind": ExchangeKind, "consistency": Consistency, "precision": Precision}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "allreduce", "staleness": 1}, "--exchange=allreduce needs --staleness=0"),
        ({"compress": "int2"}, "--compress=int2: 'int2' is not a compression method"),
        ({"compress": "auto"}, "--compress=auto needs --loss_budget=F, or auto:F"),
        ({"loss_budget": 0.1, "compress": "int8"}, "--loss_budget=0.1 is for --compress=auto"),
        ({"loss_budget": 0.1}, "--loss_budget=0.1 is for --compress=auto, not --compress=none"),
        ({"compress": "int8", "kind": "allreduce"}, "--exchange=hybrid, ps or svb"),
        ({"compress": "int8", "staleness": 1}, "--compress needs --staleness=0, not 1"),
        ({"compress": "int8", "consistency": "SSP"}, "--compress needs --consistency=SSPPush"),
        ({"compress": "int8", "precision": "float16"}, "--compress needs --wire_precision=float32"),
        ({"local_steps": -1}, "--local_steps=-1: expected 0 or more"),
        ({"local_steps": 8, "kind": "svb"}, "--local_steps=8 cannot be combined"),
        ({"local_steps": 8, "outer_lr": 0.0}, "--local_steps=outer_lr=0"),
        ({"local_steps": 8, "outer_lr": float("nan")}, "--local_steps=outer_lr=nan"),
        ({"local_steps": 8, "outer_momentum": 1.0}, "--local_steps=outer_momentum=1"),
        ({"outer_momentum": 0.5}, "--local_steps=outer_momentum needs local steps"),
        ({"outer_nesterov": False}, "--local_steps=outer_nesterov needs local steps"),
        ({"sync_delay": 2}, "--local_steps=delay needs local steps"),
        ({"local_steps": 4, "sync_fragments": 5}, "--local_steps=4,fragments=5"),
        ({"local_steps": 4, "sync_fragments": 0}, "--local_steps=4,fragments=0: expected 1 to 4"),
        ({"local_steps": 4, "sync_delay": 4}, "--local_steps=4,delay=4"),
        ({"local_steps": 4, "sync_mix": 1.0}, "--local_steps=mix=1: expected 0"),
        ({"local_steps": 4, "sync_delay": 1, "kind": "allreduce"}, "need the parameter server"),
        ({"local_steps": 4, "sync_fragments": 2, "staleness": 1}, "need the parameter server"),
        ({"quorum": 2}, "--local_steps=quorum needs local steps: give --local_steps=H too"),
        ({"local_steps": 4, "quorum": -1}, "--local_steps=quorum=-1: expected 0 or more"),
        ({"local_steps": 4, "quorum": 2, "quorum_grace": -1.0}, "--local_steps=grace=-1: expected"),
        ({"local_steps": 4, "quorum_grace": 1.0}, "needs a quorum"),
        ({"local_steps": 4, "quorum": 2, "kind": "allreduce"}, "--local_steps=quorum=2"),
        ({"local_steps": 4, "quorum": 2, "staleness": 1}, "with --staleness=1: it needs"),
        ({"local_steps": 4, "quorum": 2, "sync_delay": 1}, "fragments and delay"),
        ({"local_steps": 4, "quorum": 2, "compress": "int8"}, "with --compress=int8: it needs"),
        ({"local_steps": 4, "quorum": 2, "precision": "float16"}, "with --wire_precision=float16"),
        ({"local_steps": 4, "sync_delay": 2, "compress": "a=int8,powersgd:2"}, "powersgd cannot"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExchangeOptions(
            **{name: KINDS.get(name, type(value))(value) for name, value in values.items()}
        )


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(0, 1000, 1000), (32, 1000, 1024), (8, 1000, 1000), (500, 7, 500), (8, 0, 0)],
)
def test_replicas_are_compared_at_the_ends_of_rounds(steps: int, every: int, expected: int) -> None:
    assert ExchangeOptions(local_steps=steps, check_replicas=every).check_interval == expected


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0),
        ({"staleness": 2}, 2),
        ({"local_steps": 1}, 0),
        ({"local_steps": 8}, 7),
        ({"local_steps": 8, "staleness": 1}, 15),
        ({"local_steps": 8, "sync_delay": 2}, 9),
        ({"local_steps": 8, "quorum": 3, "quorum_grace": 1.0}, None),
    ],
)
def test_how_far_a_worker_may_be_ahead(options: dict[str, Any], most: int | None) -> None:
    assert ExchangeOptions(**options).most_lead == most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 8, "quorum": 2, "quorum_grace": 1.0}, "--local_steps=quorum=2"),
        ({"local_steps": 8, "sync_fragments": 2}, "fragments and delay of --local_steps"),
    ],
)
def test_what_several_workers_of_a_host_cannot_exchange_so(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        ExchangeOptions(**options).check_workers_per_host(2)
    ExchangeOptions(**options).check_workers_per_host(1)


def check_placed(bounds: tuple[int, ...], **options: Any) -> None:
    check_virtual_workers(VirtualWorkers(bounds), ExchangeOptions(**options))


@pytest.mark.parametrize(
    ("bounds", "options"),
    [
        ((0, 1), {}),
        ((0, 1, 2, 3), {"staleness": 2}),
        ((0, 1, 2, 3), {"local_steps": 4}),
        ((0, 6, 12), {"compress": "powersgd:2"}),
        ((0, 6, 12), {"compress": "conv.*=topk:0.1/int8"}),
        ((0, 6, 12), {"local_steps": 8, "sync_fragments": 2, "sync_delay": 1}),
    ],
)
def test_what_virtual_workers_go_with(bounds: tuple[int, ...], options: dict[str, Any]) -> None:
    check_placed(bounds, **options)


@pytest.mark.parametrize(
    ("bounds", "options", "message"),
    [
        ((0, 2, 4), {"staleness": 1}, "4 virtual workers on 2 workers cannot be combined with"),
        ((0, 5000), {}, "5000 virtual workers: expected at most 4096"),
    ],
)
def test_what_virtual_workers_do_not_go_with(
    bounds: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        check_placed(bounds, **options)
    check_virtual_workers(None, ExchangeOptions(**options))


@pytest.mark.parametrize(
    ("bounds", "quorum", "effective", "message"),
    [
        ((0, 1, 2, 3), 2, 2, ""),
        ((0, 1, 2, 3), 3, 0, ""),  # all: none
        ((0, 1, 2), 3, 0, "--local_steps=quorum=3: expected at most 2, the number of workers"),
        ((0, 2, 3, 4), 2, 0, "quorum=2 cannot be combined with 4 virtual workers on 3 workers"),
    ],
)
def test_the_quorum_of_a_job(
    bounds: tuple[int, ...], quorum: int, effective: int, message: str
) -> None:
    """What a job may not begin with, it may come to by the loss of workers: all end its rounds."""
    options, placed = ExchangeOptions(local_steps=4, quorum=quorum), VirtualWorkers(bounds)
    assert options.of_workers(placed).quorum == effective
    if message:
        with pytest.raises(UsageError, match=message):
            options.check_quorum(placed)
        return
    options.check_quorum(placed)
