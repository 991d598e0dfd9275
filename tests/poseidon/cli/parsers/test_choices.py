"""What the parsers write out so as to import nothing heavy is what the code means."""

from __future__ import annotations

from enum import Enum

import pytest

from poseidon.cli.main import COMMANDS
from poseidon.cli.parsers import jobs, nets
from poseidon.cli.requests import KIND_OF_SVB
from poseidon.cluster.supervision.restarts import RETURN_TIMEOUT_S
from poseidon.cluster.supervision.state import SignalEffect
from poseidon.data.databases.kinds import Backend
from poseidon.exchange.kinds import ExchangeKind
from poseidon.launch.request import Encrypt, JobRequest, LauncherKind, OnNan, ShownLogs
from poseidon.metrics.curves import CHARTS, XAxis, YScale
from poseidon.metrics.progress import ShownProgress
from poseidon.proto.caffe_pb2 import Phase
from poseidon.proto.overrides import OWN_FLAGS
from poseidon.pycaffe.draw import RANKDIRS
from ps_server import Consistency, Precision


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        (jobs.EXCHANGES, ExchangeKind),
        (jobs.CONSISTENCIES, Consistency),
        (jobs.PRECISIONS, Precision),
        (jobs.LAUNCHERS, LauncherKind),
        (jobs.ENCRYPTIONS, Encrypt),
        (jobs.EFFECTS, SignalEffect),
        (jobs.SHOWN, ShownLogs),
        (jobs.ON_NAN, OnNan),
        (nets.AXES, XAxis),
        (nets.SCALES, YScale),
        (jobs.PROGRESS, ShownProgress),
    ],
)
def test_members(written: tuple[str, ...], kind: type[Enum]) -> None:
    assert set(written) == {member.value for member in kind}


def test_fields_of_the_solver_with_flags_of_their_own() -> None:
    """Errors about them name these flags."""
    settings = (
        action for action in COMMANDS["train"].parser().flags() if action.dest == "settings"
    )
    assert {action.option_strings[0] for action in settings} == {
        "--set",
        *(f"--{name}" for name in OWN_FLAGS),
    }


def test_the_rest() -> None:
    assert set(jobs.SVB) == set(KIND_OF_SVB)
    assert set(jobs.BACKENDS) == {backend.suffix for backend in Backend}
    assert set(nets.PHASES) == set(Phase.keys())
    assert set(nets.RANKDIRS) == set(RANKDIRS)
    assert list(nets.CHARTS) == list(map(str, CHARTS))
    assert jobs.RETURN_TIMEOUT_S == RETURN_TIMEOUT_S == JobRequest().return_timeout
