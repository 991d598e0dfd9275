"""Options travel whole: from their flags to a worker's document and back; an added one needs a field and a flag."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields

import pytest

from poseidon.cli.main import parse_arguments
from poseidon.cli.requests import job_request
from poseidon.engine.document import ScriptDocument, read_document_of
from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from poseidon.launch.request import ScriptRequest
from ps_server import Consistency, Precision

ALL = ExchangeOptions(
    kind=ExchangeKind.SERVER,
    staleness=2,
    rows=3,
    consistency=Consistency.SSP_AGGR,
    precision=Precision.BFLOAT16,
    bandwidth_mbps=1.5,
    wait_free=False,
    check_every=7,
    on_divergence=OnDivergence.MEND,
)
"""Every field has another value than its default."""


def words_of(options: ExchangeOptions) -> list[str]:
    values = options.to_json()
    return [f"--{entry.metadata['flag']}={str(values[entry.name]).lower()}" for entry in fields(options)]


def test_the_flags_of_all_fields_give_all_fields() -> None:
    assert all(getattr(ALL, entry.name) != entry.default for entry in fields(ALL))
    words = [word.replace("sspaggr", "SSPAggr") for word in words_of(ALL)]
    assert job_request(ScriptRequest, parse_arguments(["run", *words, "script.py"])).exchange == ALL
    assert job_request(ScriptRequest, parse_arguments(["run", "script.py"])).exchange == DEFAULT_OPTIONS


def test_a_document_carries_them() -> None:
    document = ScriptDocument(job="j", token="00", output="o", script="s.py", exchange=ALL)
    assert read_document_of(ScriptDocument, document.to_json()).exchange == ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(ExchangeOptions):
    """With one option more: the field is all that it needs beside its flag."""

    compression: int = field(default=0, metadata={"flag": "compression"})


def test_an_added_option_needs_a_field_and_a_flag() -> None:
    flags = argparse.Namespace(
        **{entry.metadata["flag"]: DEFAULT_OPTIONS.to_json().get(entry.name, 4) for entry in fields(Extended)}
    )
    options = Extended.from_flags(flags, kind=ExchangeKind.HYBRID)
    assert options.compression == 4
    assert Extended.from_json(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(UsageError, match="--compression=-1: expected 0 or more"):
        Extended(compression=-1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour": 1}, "the exchange has no option colour"),
        ({"kind": "pigeon"}, "--exchange is 'pigeon'; expected hybrid or ps or svb"),
        ({"staleness": "1"}, "--table_staleness is '1'; expected int"),
        ({"rows": True}, "--num_rows_per_table is True; expected int"),
        ({"bandwidth_mbps": "fast"}, "--client_bandwidth_mbps is 'fast'; expected a number"),
        ({"kind": "allreduce", "staleness": 1}, "--exchange=allreduce has no staleness"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExchangeOptions.from_json(values)
