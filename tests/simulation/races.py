"""Past races of this code, put back one at a time: how many seeds until each is found.

    python -m tests.simulation.races --seeds 2000

A race is the text that has mended it and the text that was there before, as far as the code of
today lets it be undone. The module with it is imported with the older text.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A race.

    Attributes:
        name: of the race.
        commit: that has mended it.
        module: the module that is changed.
        mended: a text that occurs once in it.
        before: what stands in its place.
        scenario: in which it is looked for.
    """

    name: str
    commit: str
    module: str
    mended: str
    before: str
    scenario: str


SHARD = "ps_server.protocol.shard"
SESSION = "ps_server.protocol.worker_session"
MACHINE = "poseidon.cluster.supervision.state_machine"
RACES = (
    Race(
        name="a late signal of the previous store reaches workers of the next",
        commit="dbc84e8f",
        module=SHARD,
        mended="        if self._created[rank] != self._generation:\n            return",
        before="        if False:\n            return",
        scenario="server",
    ),
    Race(
        name="a shard without chunks gets the previous store after the next",
        commit="265f206f",
        module=SHARD,
        mended="        if generation < self._generation:",
        before="        if False:",
        scenario="server",
    ),
    Race(
        name="a client closes before the shards have what it sent",
        commit="0bce3481",
        module="ps_server.pump",
        mended="while (any(self.queues) or self.session.stays_on) and",
        before="while any(self.queues) and",
        scenario="server",
    ),
    Race(
        name="nobody is notified of a worker that has left too early",
        commit="7c20e67d",
        module=SHARD,
        mended="if members.left and isinstance(message, m.Push | m.PushRows):",
        before="if False:",
        scenario="server",
    ),
    Race(
        name="a signal names an iteration that a worker has passed",
        commit="e47998c3",
        module=SESSION,
        mended="self.clock + lead + 3",
        before="self.clock + lead + 2",
        scenario="server",
    ),
    Race(
        name="a signal forgets the staleness of row tables",
        commit="d1341791",
        module=SESSION,
        mended="of_rows = [spec.staleness for spec in self.rows.specs]",
        before="of_rows: list[int] = []",
        scenario="server",
    ),
    Race(
        name="a lost connection between workers goes unnoticed",
        commit="b0c014b2",
        module="poseidon.exchange.worker_links",
        mended="            self._check_losses(gone, now())\n",
        before="",
        scenario="factors",
    ),
    Race(
        name="a job that the user has killed on a host starts again",
        commit="500c00ba",
        module="poseidon.cluster.agent.agent",
        mended='return [m.KilledByUser(), *self._leave(1, "the job was killed on this host")]',
        before='return self._leave(1, "the job was killed on this host")',
        scenario="job",
    ),
    Race(
        name="a launcher that was stopped takes its processes for silent",
        commit="a3211d26",
        module=MACHINE,
        mended="self._began_s += max(0.0, now - self.now - LONGEST_WAIT_S)",
        before="pass",
        scenario="job",
    ),
    Race(
        name="a snapshot that is saved late takes the job's iteration back",
        commit="9bb5e485",
        module=MACHINE,
        mended="event.iteration, process.iteration or 0",
        before="event.iteration, 0",
        scenario="job",
    ),
    Race(
        name="a message of rank 0 keeps a task from sending its last reports",
        commit="8136659d",
        module="poseidon.cluster.dial.tasks",
        mended="                    with suppress(OSError):  # closed; its last reports are still to be sent",
        before="                    if True:",
        scenario="rendezvous",
    ),
    Race(
        name="a part is freed while its owner adds it",
        commit="cd9db889",
        module="poseidon.exchange.host.owner",
        mended="        for part in own:\n            memory.device.keep(part)\n",
        before="",
        scenario="devices",
    ),
    Race(
        name="workers of a host read a value before it is in the memory",
        commit="c4e171e6",
        module="poseidon.exchange.host.memory",
        mended="        mark.synchronize()\n",
        before="",
        scenario="devices",
    ),
    Race(
        name="an owner adds a part before it is in the memory",
        commit="c4e171e6",
        module="poseidon.exchange.host.carrier",
        mended="            event.synchronize()\n",
        before="            pass\n",
        scenario="devices",
    ),
    Race(
        name="a gradient is sent before it is on the host",
        commit="cd9db889",
        module="poseidon.exchange.server.tables",
        mended="        copied.synchronize()\n        if table.trained.statistics:",
        before="        if table.trained.statistics:",
        scenario="devices",
    ),
    Race(
        name="a value is written to a tensor that is still used",
        commit="cd9db889",
        module="poseidon.exchange.server.table",
        mended="left = device.event() if self._left is None else self._left",
        before="left = DONE",
        scenario="devices",
    ),
    Race(
        name="owners begin with values of their own",
        commit="70bf7da9",
        module="poseidon.exchange.server.tables",
        mended="            table.reload()\n",
        before="            if clock is not None:\n                table.reload()\n",
        scenario="devices",
    ),
    Race(
        name="statistics of two workers of a host leave in one memory",
        commit="70bf7da9",
        module="poseidon.exchange.server.tables",
        mended="table.to_host(source, number, clock)",
        before="table.to_host(source, 0 if table.trained.statistics else number, clock)",
        scenario="devices",
    ),
    Race(
        name="a round's memory on the host is written to before its copy has run",
        commit="cd9db889",
        module="poseidon.exchange.factors.rebuilding",
        mended="        done.synchronize()  # the rounds' memory on the host may go\n",
        before="",
        scenario="devices",
    ),
    Race(
        name="own pairs are replayed on a stream that rounds do not use",
        commit="cd9db889",
        module="poseidon.exchange.factors.rebuilding",
        mended="        with self._lock, torch.no_grad(), device.on(side):\n",
        before="        with self._lock, torch.no_grad():\n",
        scenario="devices",
    ),
    Race(
        name="pairs that are replayed are stacked in one memory",
        commit="cd9db889",
        module="poseidon.exchange.factors.weight",
        mended='self._scratch.own("own u", pair.u)',
        before='self._scratch.stack("own u", [pair.u], pair.u.shape[1])',
        scenario="devices",
    ),
)


class _Older:
    """Imports one module with the older text."""

    def __init__(self, race: Race) -> None:
        self._race = race

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._race.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(source_of(self._race)))

    def create_module(self, spec: ModuleSpec) -> None:
        """See `importlib.abc.Loader`."""

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__file__ = str(source_of(self._race))
        exec(compile(older(self._race), module.__file__, "exec"), module.__dict__)


def source_of(race: Race) -> Path:
    """Return the file of a race's module."""
    return ROOT / (race.module.replace(".", "/") + ".py")


def older(race: Race) -> str:
    """Return the module's text with the race.

    Raises:
        ValueError: what has mended it does not occur once.
    """
    text = source_of(race).read_text()
    if text.count(race.mended) != 1:
        raise ValueError(f"{race.name}: {race.module} does not have this once: {race.mended}")
    return text.replace(race.mended, race.before)


def find(race: Race, seeds: int) -> int | None:
    """Return the first seed that finds a race, from 0 on; call it before its module is imported."""
    assert race.module not in sys.modules
    sys.meta_path.insert(0, _Older(race))  # type: ignore[arg-type]
    from tests.simulation import runs

    runs.prepare()
    for ran in runs.run_seeds(race.scenario, range(seeds)):
        if ran.error is not None:
            print(f"    {ran.error}")
            return ran.seed
    return None


def main(arguments: list[str] | None = None) -> int:
    """Look for each race in a process of its own; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.races", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=2000, help="for each race")
    parser.add_argument("--race", type=int, help="this one alone, by its number from 0 on")
    flags = parser.parse_args(arguments)
    if flags.race is None:
        program = [sys.executable, "-m", "tests.simulation.races", f"--seeds={flags.seeds}"]
        found = [
            subprocess.run([*program, f"--race={number}"], check=False).returncode == 0
            for number in range(len(RACES))
        ]
        print(f"{sum(found)} of {len(RACES)} races found")
        return 0 if all(found) else 1
    race = RACES[flags.race]
    seed = find(race, flags.seeds)
    after = f"not in {flags.seeds} seeds" if seed is None else f"after {seed + 1} seeds"
    print(f"{race.commit} {race.name}: {after}", flush=True)
    return 0 if seed is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
