"""What the parsers write out so as to import nothing heavy is what the code means."""

from __future__ import annotations

from enum import Enum

import pytest

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.proto.caffe_pb2 import Phase
from poseidon.caffe.proto.overrides import OWN_FLAGS
from poseidon.cli.main import COMMANDS
from poseidon.cli.parsers import nets
from poseidon.flags.flag import BACKENDS
from poseidon.observe.metrics.curves import CHARTS, XAxis, YScale
from poseidon.pycaffe.draw import RANKDIRS


@pytest.mark.parametrize(("written", "kind"), [(nets.AXES, XAxis), (nets.SCALES, YScale)])
def test_members(written: tuple[str, ...], kind: type[Enum]) -> None:
    assert set(written) == {member.value for member in kind}


def test_fields_of_the_solver_with_flags_of_their_own() -> None:
    """Errors about them name these flags."""
    settings = (flag for flag in COMMANDS["train"].parser().flags() if flag.dest == "settings")
    assert {flag.name for flag in settings} == {"set", *OWN_FLAGS}


def test_the_rest() -> None:
    assert set(BACKENDS) == {backend.suffix for backend in Backend}
    assert set(nets.PHASES) == set(Phase.keys())
    assert set(nets.RANKDIRS) == set(RANKDIRS)
    assert list(nets.CHARTS) == list(map(str, CHARTS))
