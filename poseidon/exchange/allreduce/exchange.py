"""The all-reduce exchange: replicas sum their gradients, and each applies the update rule to the mean.

All tensors are in one plane (`plane.py`), through torch.distributed: gloo on the CPU, NCCL on GPUs. No shard runs: the
replicas meet at a rendezvous in the process of rank 0, whose store carries their collections (`control.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from torch import Tensor

from poseidon.exchange.allreduce.buckets import BUCKET_BYTES
from poseidon.exchange.allreduce.control import AllReduceDelivery, StoreCollections
from poseidon.exchange.allreduce.plane import AllReducePlane
from poseidon.exchange.allreduce.process_group import GroupSettings, ProcessGroup, Rendezvous
from poseidon.exchange.base import ExchangeSettings, History, Trained, WholeGradients
from poseidon.exchange.control import JobControl
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, common_kernel
from ps_server import PeerLost


class AllReduceExchange(WholeGradients):
    """See `Exchange`.

    Args:
        rendezvous: of the replicas.
        tensors: what to keep together.
        settings: common to all tensors.
        group: rank of this replica, number of replicas, address and timeout.
        equal_bits: whether the job ends where the processors of the replicas compute different bits.
        bucket_bytes: size of one sum.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        *,
        group: GroupSettings,
        equal_bits: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._equal_bits = equal_bits
        self._group = group
        self._tensors = tensors
        self._collections = StoreCollections(rendezvous, group)
        self._delivery = AllReduceDelivery(self._collections)
        self._plane = AllReducePlane(
            dict(enumerate(tensors)), settings, group=group, bucket_bytes=bucket_bytes
        )
        self.state = self._plane.state
        self.control = JobControl(self._delivery, root=group.rank == 0, calls_wait=True)
        self._iteration = self._finished = settings.start_clock
        self._request_group: ProcessGroup | None = None

    # -- the contract --------------------------------------------------------------------------------------

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`. Rank 0 broadcasts its histories."""
        if clock is None:
            with_histories = self._form_groups(resumed=bool(histories))
        else:
            self._iteration = self._finished = clock
            self._plane.rewind(clock)
            with_histories = True
        self.state.load(histories)
        self._plane.broadcast(histories=with_histories)

    def _form_groups(self, *, resumed: bool) -> bool:
        """Form the process groups. Return whether rank 0 continues from a history."""
        payload = {"resumed": resumed, "arithmetic": arithmetic_sample(self._tensors).to_json()}
        everyone = [json.loads(reply) for reply in self.control.all_gather(json.dumps(payload).encode())]
        samples = [Arithmetic.from_json(fields["arithmetic"]) for fields in everyone]
        common_kernel(samples, required=self._equal_bits)
        assert self._rendezvous is not None
        self._plane.form(self._rendezvous)
        self._request_group = ProcessGroup(self._rendezvous, "control", self._group)
        return bool(everyone[0]["resumed"])

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._plane.start(iteration, rate)
        assert self._request_group is not None, "the exchange is not open"
        self._delivery.start(self._request_group.sum)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`. The gradient is copied."""
        with self._others_take_part():
            self._plane.begin(index, gradient)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        with self._others_take_part():
            self._plane.begin_factors(index, u_KN, v_KM)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        with self._others_take_part():
            self._plane.wait(index)

    def finish(self) -> None:
        """See `Exchange`."""
        with self._others_take_part():
            self._plane.finish()
            self._delivery.finish(self._iteration + 2)
        self._finished = self._iteration + 1

    @contextlib.contextmanager
    def _others_take_part(self) -> Iterator[None]:
        """Name the worker that has left, where a sum fails because it has."""
        try:
            yield
        except PeerLost:
            self._collections.check_left(self._finished)
            raise

    def settle(self) -> None:
        """See `Exchange`."""
        with self._others_take_part():
            self._plane.settle(self._finished)

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return self._plane.traffic()

    def close(self) -> None:
        """See `Exchange`. The others' waits for this replica end with an error."""
        self._collections.leave(self._finished)
        self._plane.close()
        self._request_group = None
        self._collections.close()
        self._rendezvous = None
