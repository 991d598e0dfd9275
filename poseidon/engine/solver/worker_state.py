"""The state of one virtual worker between two iterations: what its next one depends on, besides
the values that all virtual workers share.

Law: nets that were compiled for a virtual worker and got its state compute what the nets that the
state is of would have computed, on any process. Layers that keep more (`Layer.KEEPS_STATE`) are
excepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.engine.solver.replica import WorkerNets
from poseidon.exchange.job_control import join, split
from poseidon.proto.caffe_pb2 import PoseidonWorkerState


def state_of(nets: WorkerNets, losses: Sequence[float]) -> PoseidonWorkerState:
    """Return the state of a virtual worker.

    Args:
        nets: its nets.
        losses: in its average, oldest first.
    """
    state = PoseidonWorkerState(rank=nets.number, torch_rng=nets.train.random_state())
    state.smoothed_loss.extend(losses)
    for name, reader in nets.train.readers():
        state.reader.add(layer=name, batches=reader.batches_done)
    return state


def restore(nets: WorkerNets, state: PoseidonWorkerState, *, batches: int = 0) -> None:
    """Set the nets of a virtual worker to its state.

    Args:
        nets: its nets.
        state: of it.
        batches: that a data layer has read that the state does not have.

    Raises:
        SnapshotError: the state is of another net.
    """
    known = {reader.layer: reader.batches for reader in state.reader}
    for name, reader in nets.train.readers():
        reader.skip_to(known.get(name, batches))
    nets.train.set_random_state(state.torch_rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The state of a virtual worker on its way to another process.

    Attributes:
        state: of its train net.
        tests: the random states of its test nets.
    """

    state: PoseidonWorkerState
    tests: tuple[bytes, ...]

    @classmethod
    def of(cls, nets: WorkerNets, losses: Sequence[float]) -> Leaving:
        """Return the state of nets; see `state_of`."""
        tests = tuple(net.random_state() for net in nets.tests)
        return cls(state=state_of(nets, losses), tests=tests)

    def pack(self) -> bytes:
        """Return it as bytes."""
        return join((self.state.SerializeToString(), *self.tests))

    @classmethod
    def unpack(cls, payload: bytes) -> Leaving:
        """Return what `pack` has packed."""
        state, *tests = split(payload)
        return cls(state=PoseidonWorkerState.FromString(state), tests=tuple(tests))

    def arrive(self, nets: WorkerNets) -> None:
        """Set the nets that were compiled for the virtual worker to its state.

        The readers of test nets follow from the number of test passes (`Tester.skip_to`).
        """
        restore(nets, self.state)
        for net, random_state in zip(nets.tests, self.tests, strict=True):
            net.set_random_state(random_state)
