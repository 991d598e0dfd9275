"""What a claim is: a figure of a page, how it is measured again, and the band where it holds.

Law: pure. A figure is a ratio of two jobs that one command measures by turns on one machine, so
that it means the same on another machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.testbed.worker_settings import DEFAULT, PoseidonSettings
from poseidon.errors import PoseidonError

Facts = Sequence[Mapping[str, Any]]
"""One fact a job and rate, as `cluster.py --json` and `scale.py --json` write them."""


class ClaimError(PoseidonError):
    """A figure cannot be measured; the text says why in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A command that measures some claims.

    Attributes:
        name: of the measurement.
        words: its arguments.
        script: in `benchmarks`; `cluster.py` makes network namespaces, which needs root.
    """

    name: str
    words: str
    script: str = "cluster.py"

    @property
    def command(self) -> str:
        """What a reader types."""
        sudo = "sudo " if self.script == "cluster.py" else ""
        return f"{sudo}python benchmarks/{self.script} {self.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times as fast as another job one of ours is.

    Attributes:
        measurement: the name of the command that measures both.
        rate_mbit: of the links; None: unshaped.
        ours: our job, as `--ours` takes it, and its further words: `ps 4 servers`.
        other: the other job, as the table names it.
    """

    measurement: str
    rate_mbit: float | None
    ours: str
    other: str = "DDP"

    def seconds(self, facts: Facts) -> tuple[float, float]:
        """Return the seconds of an iteration: ours, and the other job's.

        Raises:
            ClaimError: a job is missing.
        """
        return self._seconds(facts, _table_name(self.ours)), self._seconds(facts, self.other)

    def _seconds(self, facts: Facts, job: str) -> float:
        for fact in facts:
            if fact["rate_mbit"] == self.rate_mbit and fact["job"].removesuffix(" in clear") == job:
                return float(fact["median_s"])
        raise ClaimError(f"{self.measurement} has not measured {job}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A figure that is not measured here; its stored result is compared.

    Attributes:
        reason: why it is not measured here.
        command: what measured it.
        file: the stored result, a path in this repository.
        pattern: finds the figure there; its last match counts.
    """

    reason: str
    command: str
    file: str
    pattern: str

    def stored(self, text: str) -> float:
        """Return the figure in the text of the stored result.

        Raises:
            ClaimError: it is not there.
        """
        found = re.findall(self.pattern, text)
        if not found:
            raise ClaimError(f"{self.file} has no figure like {self.pattern}")
        return float(found[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure that a page shows.

    Attributes:
        name: the field of a sentence.
        what: what the figure is, for tables.
        by: how it is measured.
        tolerance: how far, as a part of the published figure, a new one may be below it, and that
            one below the new.
    """

    name: str
    what: str
    by: Speedup | Elsewhere
    tolerance: float = 0.1

    def band(self, published: str) -> tuple[float, float]:
        """Return the least and the greatest new figure that confirm the published one."""
        figure = float(published)
        return figure / (1 + self.tolerance), figure * (1 + self.tolerance)

    def holds(self, published: str, now: float) -> bool:
        """Whether a figure confirms the published one."""
        least, most = self.band(published)
        return least <= now <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A sentence or a row of a page, with the names of claims in braces for their figures.

    Attributes:
        page: its path.
        template: the text, on one line.
    """

    page: str
    template: str

    def text(self, figures: Mapping[str, str]) -> str:
        """Return the text with figures, by claim."""
        return re.sub(r"\{([\w.-]+)\}", lambda match: figures[match[1]], self.template)

    @property
    def names(self) -> list[str]:
        """The claims in it."""
        return re.findall(r"\{([\w.-]+)\}", self.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is stored of a claim.

    Attributes:
        published: the figure, as the page has it; empty: none yet.
        ours_s, other_s: seconds of an iteration of both jobs in the last measurement; None: they
            are not measured, or could not be.
        load: the machine's load average when that began.
    """

    published: str = ""
    ours_s: float | None = None
    other_s: float | None = None
    load: float = 0.0

    @property
    def now(self) -> float | None:
        """The figure of the last measurement."""
        return None if self.ours_s is None or self.other_s is None else self.other_s / self.ours_s


def _table_name(ours: str) -> str:
    """Return the name in the table: the default exchange has its own there."""
    text, space, rest = ours.partition(" ")
    return (PoseidonSettings.parse(text).name if text.startswith(DEFAULT) else text) + space + rest
