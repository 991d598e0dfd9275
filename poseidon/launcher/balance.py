"""The value of --balance: how fast the clients of a job are, beside each other.

Law: a balance decides where virtual workers are computed, never what they compute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import UsageError, counted
from poseidon.flags.values import positive

MEASURED = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Relative speeds of clients.

    Attributes:
        speeds: of each client that works, above 0; empty: all are equally fast.
        measured: whether virtual workers move by the measured speeds of workers.
    """

    speeds: tuple[float, ...] = ()
    measured: bool = False

    @classmethod
    def read(cls, text: str) -> Balance:
        """Read the flag's value: numbers with commas, or `auto`.

        Raises:
            argparse.ArgumentTypeError: it is neither.
        """
        if text.lower() == MEASURED:
            return cls(measured=True)
        try:
            return cls(speeds=tuple(positive(part) for part in text.split(",")))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(
                f"expected the speed of each client, as 1,0.5, or auto, found '{text}'"
            ) from error

    def of_clients(self, clients: Sequence[int]) -> dict[int, float]:
        """Return the speed of each client; empty: they count as equally fast.

        Args:
            clients: the ids of those that work, in order.

        Raises:
            UsageError: there are more or fewer speeds.
        """
        if self.speeds and len(self.speeds) != len(clients):
            raise UsageError(
                f"--balance has {counted(len(self.speeds), 'speed')}, and this job has "
                f"{counted(len(clients), 'client')} with workers; expected one for each, in the "
                "order of their ids"
            )
        return dict(zip(clients, self.speeds, strict=True)) if self.speeds else {}
