"""The words of an exchange: of a whole job, and of one tensor.

Law: this module does not import torch, so that the command line reads the words.
"""

from __future__ import annotations

from enum import Enum


class Scheme(Enum):
    """How one tensor is exchanged."""

    SERVER = "ps"
    """Gradients go to the shards, values come back."""
    FACTORS = "svb"
    """The two factors of the gradient go to every other worker."""
    ALLREDUCE = "allreduce"
    """A sum over all workers, through their own connections."""
    LOCAL = "local"
    """Nothing leaves the process."""


class ExchangeKind(Enum):
    """The exchange of a job (`--exchange`), which decides the scheme of each tensor."""

    AUTO = "auto"
    """The fastest of server, factors and all-reduce, tensor by tensor, by a measurement."""
    HYBRID = "hybrid"
    """The cheaper of server and factors, tensor by tensor."""
    SERVER = "ps"
    """Every tensor to the server."""
    FACTORS = "svb"
    """Every fully-connected weight as factors, the rest to the server."""
    ALLREDUCE = "allreduce"
    """Every tensor by all-reduce; no shards."""
    LOCAL = "local"
    """One worker, no network."""

    @property
    def sends_factors(self) -> bool:
        """Whether weights may travel as factors."""
        return self in (ExchangeKind.AUTO, ExchangeKind.HYBRID, ExchangeKind.FACTORS)

    @property
    def has_shards(self) -> bool:
        """Whether tensors may go to shards."""
        return self not in (ExchangeKind.ALLREDUCE, ExchangeKind.LOCAL)
