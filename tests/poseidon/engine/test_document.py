"""The job document survives its line of JSON, and what does not fit is named."""

from __future__ import annotations

import json

import pytest

from poseidon.engine.document import JobDocument, Prints, ScriptDocument, read_document
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server.network import Network

DOCUMENT = JobDocument(
    job="j",
    solver="s.prototxt",
    output="out",
    member=Membership(
        network=Network(rank=1, size=2), hosts=(1, 1), options=ExchangeOptions(staleness=3)
    ),
    weights=("a", "b"),
)


def test_round_trip() -> None:
    assert read_document(JobDocument, DOCUMENT.to_json()) == DOCUMENT
    assert b"\n" not in DOCUMENT.to_json()


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(DOCUMENT.to_json()), **fields})


def moved(**fields: object) -> str:
    member = json.loads(DOCUMENT.to_json())["member"]
    return changed(member={**member, **fields})


BROKEN = {
    "empty": ("", "is not JSON"),
    "no object": ("[1]", "[1] is not a JobDocument"),
    "unknown field": (changed(colour="red"), "does not know: colour"),
    "text for a number": (moved(network={"rank": "1"}), "Network has '1' as its rank"),
    "true for a number": (moved(network={"rank": True}), "Network has True as its rank"),
    "rank beyond": (moved(network={"rank": 2, "size": 2}), "rank is 2 of 2 workers"),
    "other hosts": (
        moved(hosts=[1, 2]),
        r"hosts are (1, 2); expected 2 workers in all, and one or more on",
    ),
    "a host without": (
        moved(hosts=[2, 0]),
        r"hosts are (2, 0); expected 2 workers in all, and one or more",
    ),
    "no workers": (moved(network={"size": 0}), "rank is 0 of 0 workers"),
    "negative": (moved(options={"staleness": -1}), "--staleness=-1: expected 0 or more"),
    "consistency": (
        moved(options={"consistency": "BSP"}),
        "ExchangeOptions has 'BSP' as its consistency",
    ),
    "incomplete": ("{}", "JobDocument has no job"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_documents_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_document(JobDocument, line)
    assert message in str(caught.value)


def test_a_script_is_told_its_words_and_no_solver() -> None:
    document = ScriptDocument(
        job="j", output="o", script="s.py", arguments=("--x", "1"), prints=Prints.STDERR
    )
    assert read_document(ScriptDocument, document.to_json()) == document
    with pytest.raises(UsageError, match=r"not know: arguments, ddp, .*, prints, restarts, script"):
        read_document(JobDocument, document.to_json())
    wrong = document.to_json().replace(b'"stderr"', b'"paper"')
    with pytest.raises(UsageError, match="ScriptDocument has 'paper' as its prints"):
        read_document(ScriptDocument, wrong)


def test_files_that_were_sent_have_the_names_that_the_user_knows() -> None:
    document = ScriptDocument(job="j", output=".", script="x", sources={"/s/0/a.pt": "/runs/a.pt"})
    assert document.named("resuming from /s/0/a.pt, b.pt") == "resuming from /runs/a.pt, b.pt"
