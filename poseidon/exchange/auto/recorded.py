"""The plan that a job with `--exchange=auto` has made, as its `exchange_plan.json` and its
snapshots keep it.

Law: two jobs with the same plan, workers and data have the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from poseidon.base.foreign_files import read_definition
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.options import Scheme
from ps_server.json_fields import fields_of, plain, value_of

if TYPE_CHECKING:
    from poseidon.exchange.cost import ExchangePlan

FILE_NAME = "exchange_plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """The scheme of each tensor.

    Attributes:
        schemes: by the tensors' names, in the order of the job's tensors.
        basis: what the choice follows from, as the end of a line.
    """

    schemes: Mapping[str, Scheme]
    basis: str = ""

    @classmethod
    def of_choices(cls, plan: ExchangePlan) -> RecordedPlan:
        return cls(schemes={c.name: c.scheme for c in plan.choices}, basis=plan.basis)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(fields_of(self), default=plain, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> RecordedPlan:
        """Return the plan that `to_json` has written.

        Raises:
            UsageError: it is something else.
        """
        try:
            return value_of(cls, json.loads(text))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{source} is not a plan of an exchange; expected the {FILE_NAME} that a job with "
                "--exchange=auto has written to its folder"
            ) from error

    @classmethod
    def read(cls, path: Path) -> RecordedPlan:
        """Read a file.

        Raises:
            UsageError: it is not a plan.
            SnapshotError: it cannot be read.
        """
        try:
            text = read_definition(path).decode(errors="replace")
        except OSError as error:
            raise SnapshotError(
                f"cannot read the exchange plan {path}: {error.strerror or error}"
            ) from error
        return cls.from_json(text, str(path))

    def of(self, names: Sequence[str]) -> tuple[Scheme, ...]:
        """Return the schemes of a job's tensors.

        Raises:
            UsageError: the plan is of other tensors.
        """
        missing = [name for name in names if name not in self.schemes]
        extra = [name for name in self.schemes if name not in names]
        if missing or extra:
            which = f"has no tensor '{missing[0]}'" if missing else f"has a tensor '{extra[0]}'"
            raise UsageError(
                f"the exchange plan is for a different net: it {which}; give the plan of a job "
                "with the same net, or leave out --exchange_plan"
            )
        return tuple(self.schemes[name] for name in names)
