"""The outcome of a job with a fault, and the table of all outcomes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.chaos_runs.faults import Fault, Kind
from poseidon.errors import counted

_REPEATED = re.compile(r"at least (\d+) iterations? repeated")
_RESTARTS = re.compile(r"after (\d+) restarts?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The outcome of one run.

    Attributes:
        seed: seed of its fault.
        fault: the fault.
        hit: number of the job's processes that it hit.
        at_s: time of the fault, after the start of the command.
        took_s: time from the fault to the end of the command; if the launcher was killed, to the
            end of the job's last process.
        status: exit status of the command.
        last: its last line.
        traceback: True if it printed one.
        same_bits: True if the run without a fault has the same weights; None: there are none.
        left: number of processes of the job that are left on any host.
    """

    seed: int
    fault: Fault
    hit: int
    at_s: float
    took_s: float
    status: int
    last: str
    traceback: bool
    same_bits: bool | None
    left: int

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        found = _RESTARTS.search(self.last)
        return int(found[1]) if found else 0

    @property
    def good(self) -> bool:
        """True if it ended with the right weights, or with one sentence, and left nothing."""
        if self.left or self.traceback:
            return False
        return self.same_bits is True if self.status == 0 else bool(self.last) or self.status < 0

    @property
    def words(self) -> str:
        """The outcome as text, for the table."""
        if self.status == 0:
            repeated = _REPEATED.search(self.last)
            again = f", {repeated[1]} iterations repeated" if repeated else ""
            return f"finished, {counted(self.restarts, 'restart')}{again}"
        if self.status < 0:
            return f"the launcher was killed; its processes ended within {self.took_s:.0f} s"
        return f"exit {self.status}: {self.last}"


def to_line(run: Ended) -> str:
    """Return a run as a line of JSON."""
    return (
        json.dumps({**asdict(run), "fault": {**asdict(run.fault), "kind": run.fault.kind.value}})
        + "\n"
    )


def read_lines(text: str) -> list[Ended]:
    """Parse lines of `to_line`; return the latest run of each seed, in order."""
    runs = {}
    for line in text.splitlines():
        fields = json.loads(line)
        fault = Fault(**{**fields.pop("fault"), "kind": Kind(json.loads(line)["fault"]["kind"])})
        runs[fields["seed"]] = Ended(**fields, fault=fault)
    return [runs[seed] for seed in sorted(runs)]


def table(runs: Sequence[Ended]) -> list[str]:
    """Return a table in Markdown, a row for each run."""
    lines = [
        "| run | fault | client | at | processes hit | end | weights | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        bits = {True: "same bits", False: "OTHER BITS", None: "-"}[run.same_bits]
        cells = (
            run.seed,
            run.fault.kind.value,
            run.fault.client,
            f"{run.at_s:.1f} s",
            run.hit,
            run.words,
            bits,
            run.left,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
