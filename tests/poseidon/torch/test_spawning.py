"""What a process is told that a script has started; `tests/distributed/test_ddp_scripts.py` has
jobs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch.distributed

from poseidon.engine.document import ScriptDocument
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.torch.spawned import Link, asked_for, name_of, this_machine
from poseidon.torch.spawning import ScriptPlace
from ps_server.network import Network
from tests.support.polling import until

HERE = this_machine()


@pytest.fixture
def place() -> Iterator[ScriptPlace]:
    """The place of worker 1 of three, of which 1 and 2 are on this machine."""
    document = ScriptDocument(
        job="j",
        output="/o",
        script="s.py",
        member=Membership(network=Network(rank=1, size=3, token=b"ab")),
        ddp=True,
    )
    launcher = LauncherConnection(io.StringIO(), io.StringIO())
    with closing(ScriptPlace(document, launcher)) as own:
        own.open(["elsewhere", HERE, HERE])
        yield own


@pytest.mark.parametrize(
    ("rank", "size", "reply"),
    [
        (1, 3, {"do": "take", "of": name_of(b"ab", 1)}),
        (2, 3, {"do": "take", "of": name_of(b"ab", 2)}),
        (0, 3, "with rank 0; expected one of the ranks of this machine's workers: 1, 2"),
        (3, 3, "workers: 1, 2"),
        (None, 3, "workers: 1, 2"),
        (0, 2, "is called for 2 workers, and the job has 3 workers: the script starts"),
        (0, None, "is called for no number of workers"),
    ],
)
def test_places(place: ScriptPlace, rank: int | None, size: int | None, reply: object) -> None:
    with closing(Link.to(name_of(b"ab", 1))) as link:
        answer = link.ask(do="place", rank=rank, size=size)
    if isinstance(reply, str):
        assert reply in answer["error"]
    else:
        assert answer == reply


def test_a_place_can_be_reached_before_the_machines_are_known() -> None:
    """Another worker may know them earlier."""
    member = Membership(network=Network(token=b"ef"))
    document = ScriptDocument(job="j", output="/o", script="s.py", member=member, ddp=True)
    launcher = LauncherConnection(io.StringIO(), io.StringIO())
    with (
        closing(ScriptPlace(document, launcher)) as place,
        closing(Link.to(name_of(b"ef", 0))) as link,
    ):
        link.write(do="place", rank=0, size=1)
        place.open([HERE])
        assert link.read() == {"do": "take", "of": name_of(b"ef", 0)}


@pytest.mark.parametrize("takes_part", [False, True])
def test_others_wait_for_the_end_of_the_first_script(place: ScriptPlace, takes_part: bool) -> None:
    with closing(Link.to(name_of(b"ab", 1))) as link, closing(Link.to(name_of(b"ab", 1))) as other:
        if takes_part:
            other.ask(do="place", rank=1, size=3)
        link.write(do="wait")
        until(lambda: len(place._end._waiting) == 1, "the place has heard it", 20.0)
        place.close()
        assert link.read() == ({} if takes_part else {"free": True})


def test_others_are_free_once_the_first_script_joins_by_itself(place: ScriptPlace) -> None:
    with closing(Link.to(name_of(b"ab", 1))) as link:
        link.write(do="wait", number=1)
        place._begin_own()
        assert link.read() == {"free": True}


def test_both_at_once_are_refused(place: ScriptPlace) -> None:
    with closing(Link.to(name_of(b"ab", 1))) as link:
        link.ask(do="place", rank=1, size=3)
    with place.spawns(ExitStack()), pytest.raises(UsageError, match="do one of the two"):
        torch.distributed.init_process_group("gloo")


def test_what_a_call_asks_for() -> None:
    assert asked_for("gloo", "tcp://h:1", None, 4, 2) == {"rank": 2, "size": 4}
    assert asked_for("gloo", rank=0) == {"rank": 0, "size": None}
