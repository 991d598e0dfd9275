"""How a worker's process reports its end, whatever its work."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from poseidon.engine import process
from poseidon.engine.document import WorkerDocument, WorkKind
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.work import Work
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from ps_server import PeerLost, PeerUnreachable
from ps_server.network import Network


class Failing(Work[WorkerDocument]):
    """Raises an error, or ends with fields of the last event."""

    result: Exception | Mapping[str, object]
    place = ""

    def run(self) -> Mapping[str, object]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def location(self, error: BaseException) -> str:
        return self.place


def end(folder: Path, result: Exception | Mapping[str, object], place: str) -> dict[str, Any]:
    """Return the last event of a worker, with its exit code."""
    outlet = io.StringIO()
    document = WorkerDocument(
        job="j", output=str(folder), member=Membership(network=Network(rank=1, size=2))
    )
    work = Failing(document, LauncherConnection(io.StringIO(), outlet))
    work.result, work.place = result, place
    code = process.run_work(work)
    event: dict[str, Any] = json.loads(outlet.getvalue().splitlines()[-1])
    return {**event, "code": code}


FULL = OSError(errno.EMFILE, "no more")


@pytest.mark.parametrize(
    ("error", "place", "message", "exit_code", "peer_lost"),
    [
        (UsageError("no."), "", "no.", 2, False),
        (UsageError("no."), "own.py:3", "worker 1: own.py:3: no.", 2, False),
        (PeerLost("worker 0 has gone"), "", "worker 0 has gone", 1, True),
        (PeerUnreachable("no answer"), "", "no answer", 1, True),
        (ValueError("a\n  b"), "", "worker 1: ValueError: a b (details in LOG)", 1, False),
        (ValueError("a"), "own.py:3", "worker 1: own.py:3: ValueError: a (details in LOG)", 1, False),
        (MemoryError(), "", "worker 1: out of memory: ", 1, False),
        (FULL, "", "worker 1: too many open files and connections: ", 1, False),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(
    error: Exception, place: str, message: str, exit_code: int, peer_lost: bool, tmp_path: Path
) -> None:
    log = tmp_path / "worker_1.log"
    event = end(tmp_path, error, place)
    assert event.pop("message").startswith(message.replace("LOG", str(log)))
    expected = {"event": "error", "exit_code": exit_code, "peer_lost": peer_lost, "code": 1}
    expected["unreachable"] = isinstance(error, PeerUnreachable)
    is_expected = isinstance(error, UsageError | PeerLost)
    assert (event.pop("traceback") == "") is is_expected
    assert event == expected
    assert log.exists() is not is_expected
    assert is_expected or "Traceback" in log.read_text(encoding="utf-8")


def test_a_good_end_has_what_the_work_says_besides(tmp_path: Path) -> None:
    assert end(tmp_path, {"joined": False}, "") == {"event": "done", "joined": False, "code": 0}


def test_there_is_a_class_for_each_kind_of_work() -> None:
    for kind, name in process.WORK.items():
        work_class: type[Work[Any]] = process.pkgutil.resolve_name(name)
        assert work_class.document_class.kind is kind
    assert process.WORK.keys() == set(WorkKind)
