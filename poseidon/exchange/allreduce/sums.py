"""The sums of one worker: its memory of all buckets, and the thread that adds.

A worker fills copies of all tensors (`memory.py`), one for each node of the tree whose sum it sends.
The first copy takes the means. Law: a copy is written to only while nobody reads it.

* A worker's parts leave from its copies, and the mean of a slice overwrites them: its owner has had
  them all by then.
* An owner's mean leaves from memory of its own, because this worker's next gradient overwrites the
  copy. Before the next one each other worker has sent a part of it, so it has the last one.

A message to a worker that has opened this worker's memory has no payload: the receiver knows where
the numbers are, and reads and adds them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from poseidon.exchange.allreduce.memory import SumsMemory
from poseidon.exchange.allreduce.sum_rounds import FLOAT_BYTES, Buckets, SumRounds
from poseidon.exchange.device import Device, Event, Streams
from poseidon.exchange.observer import Traffic, TransitTimes
from poseidon.exchange.peers import Peers
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import RemoteProtocolError
from ps_server.protocol.precision import as_tensor
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from ps_server.rules import Halves
from ps_server.transport.base import Buffer


class BucketTraffic:
    """The traffic of tensors that travel in buckets.

    Attributes:
        bytes_out: of each bucket.
        bytes_in: the same.
        transit: the times in transit by tensor.
        first_round: of gradients. Values before it are not counted.
    """

    def __init__(self, layout: Buckets) -> None:
        self._layout = layout
        self.bytes_out, self.bytes_in = [0] * len(layout), [0] * len(layout)
        self.transit = TransitTimes(max(layout.places, default=-1) + 1)
        self.first_round = 0

    def of_tensors(self) -> dict[int, Traffic]:
        """Return the traffic of each tensor: its part of the traffic of its buckets."""
        return {
            index: Traffic(
                bytes_out=self._of_tensor(index, self.bytes_out),
                bytes_in=self._of_tensor(index, self.bytes_in),
                on_way_s=self.transit.total_s[index],
            )
            for index in self._layout.places
        }

    def _of_tensor(self, index: int, of_buckets: Sequence[int]) -> int:
        layout, total = self._layout, 0
        for bucket in layout.of[index]:
            size = layout.slices[bucket][-1].stop - layout.slices[bucket][0].start
            total += of_buckets[bucket] * layout.shared(index, bucket) // size
        return total


class Sums:
    """The sums of one worker over all workers.

    In a round each tensor is filled once for each node of this worker, in the order of the nodes.
    `mean` waits for the mean over all virtual workers.

    Args:
        sizes: elements of each tensor, by index, in the order in which their gradients come; the
            same on all workers.
        peers: the connections, not connected yet.
        device: to and from which the memory is copied.
        bucket_bytes: see `Buckets`.

    Attributes:
        memory: of the gradients and means; all workers let each other open it by `memory.lend`.
        traffic: of the tensors.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        peers: Peers,
        workers: VirtualWorkers,
        device: Device,
        *,
        bucket_bytes: int | None = None,
    ) -> None:
        self._peers = peers
        self._layout = layout = Buckets(sizes, peers.size, bucket_bytes)
        self._rounds = SumRounds(peers.rank, workers, layout)
        self._filled = dict.fromkeys(sizes, 0)
        self._workers = workers
        self.memory = SumsMemory(peers, layout, workers, device)
        of_node = [len(tensors) for tensors in layout.tensors]
        self._unfilled = [list(of_node) for _ in workers.nodes(peers.rank)]
        self._trees: list[TreeSum[Tensor]] = list(map(self._new_tree, range(len(layout))))
        self.traffic = BucketTraffic(layout)
        self._streams = Streams.of(device)
        self._copies = SerialExecutor(
            f"sums-out-{peers.rank}",
            peers.failing("sending gradients failed"),
            threaded=not device.is_host,
            timeout_s=peers.timeout_s,
        )
        self._adding = SerialExecutor(
            f"add-{peers.rank}",
            peers.failing("adding gradients failed"),
            threaded=True,
            timeout_s=peers.timeout_s,
        )
        peers.on("Part", 3, self._take_part)
        peers.on("Values", 2, self._take_values)
        peers.on("Mean", 2, self._take_mean)

    def _new_tree(self, bucket: int) -> TreeSum[Tensor]:
        def add(left: Tensor, right: Tensor, node: Node) -> Tensor:
            if node != (0, self._workers.count):
                return left.add_(right)
            halves = Halves(left, right, self._workers.count)
            mean = self.memory.own.means[bucket]
            halves.write_mean(self._slice(self._peers.rank, bucket), mean)
            return mean

        return TreeSum(self._workers.count, add)

    def fill(self, index: int, part: Tensor | None) -> None:
        """Fill a tensor's next part of the sum in the background; None: with zeros. Buckets that
        are complete leave.

        The tensor's last mean must have been used.
        """
        node = self._filled[index] % len(self._unfilled)
        self._filled[index] += 1
        self._copies.call(partial(self._copy, index, node, part, self._streams.device.event()))

    def end_round(self, statistics: Mapping[int, Tensor]) -> None:
        """Fill the parts that are missing: with the values of statistics, or with zeros."""
        for index, filled in self._filled.items():
            for _ in range(filled, len(self._unfilled)):
                self.fill(index, statistics.get(index))
        self._filled = dict.fromkeys(self._filled, 0)

    def _copy(self, index: int, node: int, part: Tensor | None, ready: Event) -> None:
        memory = self.memory.own.copies[node][self._layout.places[index]]
        if part is None:
            ready.synchronize()  # the last mean may still be on its way from there to the device
            memory.zero_()
        else:
            device, out, _ = self._streams
            device.copy(part, memory, out, ready).synchronize()
        if node == 0:
            self.traffic.transit.depart(index)
        unfilled = self._unfilled[node]
        for bucket in self._layout.of[index]:
            unfilled[bucket] -= 1
            if not unfilled[bucket]:
                unfilled[bucket] = len(self._layout.tensors[bucket])
                self._launch(bucket, node)

    def _launch(self, bucket: int, node: int) -> None:
        """Send the owners of a bucket their slices of a node's sum."""
        rounds, peers = self._rounds, self._peers
        with peers.monitor:
            number = rounds.begin(bucket) if node == 0 else rounds.round(bucket)
            self._send_slices("Part", bucket, number, node)
            if peers.rank in self._layout.owners(bucket):
                of_tree = rounds.take_part(peers.rank, bucket, number, node)
                own = self._slice(peers.rank, bucket, node)
                self._adding.call(partial(self._add, bucket, of_tree, own))
        peers.links.wake()

    def expect_values(self) -> None:
        """Begin a round of rank 0's values. All workers do so before rank 0 sends them."""
        with self._peers.monitor:
            for bucket in range(len(self._layout)):
                self.traffic.first_round = self._rounds.begin(bucket) + 1

    def send_values(self, values: Mapping[int, Tensor]) -> None:
        """Send the values of tensors to all workers, from rank 0; they come as means.

        The values of other tensors are any numbers.
        """
        for index, value in values.items():
            self.memory.own.copies[0][self._layout.places[index]].copy_(value)
        rank = self._peers.rank
        with self._peers.monitor:
            for bucket in range(len(self._layout)):
                number = self._rounds.round(bucket)
                self._send_slices("Values", bucket, number)
                self._rounds.take_values(rank, bucket, number)
                self._adding.call(partial(self._pass_on, bucket, self._slice(rank, bucket)))
        self._peers.links.wake()

    def _send_slices(self, kind: str, bucket: int, number: int, node: int = 0) -> None:
        """Send the other owners of a bucket their slices of this worker's copy of a node."""
        numbers = (bucket, number, node) if kind == "Part" else (bucket, number)
        for owner in self._peers.others:
            own = self._slice(owner, bucket, node)
            if own.numel():
                self._send([owner], kind, bucket, numbers, own)

    def _send(
        self, ranks: Sequence[int], kind: str, bucket: int, numbers: Sequence[int], part: Tensor
    ) -> None:
        # the bucket that is complete last has what the next forward pass needs first
        priority = len(self._layout) - 1 - bucket
        near = self.memory.lent.intersection(ranks)
        far = [rank for rank in ranks if rank not in near]
        for receivers, payload in ((far, part.numpy().data.cast("B")), ([*near], b"")):
            if receivers:
                self._peers.send(receivers, kind, *numbers, payload=payload, priority=priority)
        if numbers[1] >= self.traffic.first_round:
            self.traffic.bytes_out[bucket] += part.nbytes * len(ranks)

    def _slice(self, owner: int, bucket: int, node: int = 0) -> Tensor:
        return self.memory.own.copies[node][self._layout.slices[bucket][owner]]

    def mean(self, index: int, iteration: int) -> Tensor:
        """Wait for the mean of a tensor, and return it: it may be written to.

        Args:
            iteration: whose gradients are summed.

        Raises:
            PeerLeft: a worker has left before this iteration's end.
            PeerLost: the connections have failed.
            StalenessTimeout: the mean did not come in time; the text names the workers from whom
                something is missing.
        """
        self._copies.drain()  # a round begins with the last of its copies
        buckets = self._layout.of[index]

        def has_come() -> bool | None:
            if all(self._rounds.has_ended(bucket) for bucket in buckets):
                return True
            if self._peers.links.left and any(self._rounds.missing(bucket) for bucket in buckets):
                self._peers.check_left(iteration)  # what has come may still be put in its place
            return None

        def hangs() -> str:
            missing = sorted({w for bucket in buckets for w in self._rounds.missing(bucket)})
            return f"; missing: {self._peers.names(missing) or 'none'}"

        self._peers.monitor.wait_for(
            has_come, f"the sum of iteration {iteration} did not arrive", hangs=hangs
        )
        return self.memory.own.copies[0][self._layout.places[index]]

    def close(self, iterations: int) -> None:
        """Leave after so many iterations, and stop to add. Safe to call twice."""
        self._copies.close()
        self._peers.close(iterations)
        self._adding.close()
        with self._peers.monitor:
            self._trees.clear()
            self.memory.close()

    # Messages, under the monitor.

    def _take_part(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        bucket, number, node = fields
        part = self._tensor(sender, bucket, number, self._peers.rank, payload, node)
        of_tree = self._rounds.take_part(sender, bucket, number, node)
        self._adding.call(partial(self._add, bucket, of_tree, part))

    def _take_values(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        bucket, number = fields
        values = self._tensor(sender, bucket, number, self._peers.rank, payload)
        self._rounds.take_values(sender, bucket, number)
        self._adding.call(partial(self._pass_on, bucket, values))

    def _take_mean(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        bucket, number = fields
        total = self._tensor(sender, bucket, number, sender, payload, None)
        place = self._rounds.take_mean(sender, bucket, number)
        self._adding.call(partial(self._put, bucket, place, total))

    def _tensor(
        self,
        sender: int,
        bucket: int,
        number: int,
        owner: int,
        payload: Buffer,
        node: int | None = 0,
    ) -> Tensor:
        """Return what a message brings as a tensor over its memory.

        Args:
            owner: whose slice it is.
            node: whose sum it is, by its number among the sender's; None: it is the mean.

        Raises:
            RemoteProtocolError: it is not an owner's slice of a bucket.
        """
        layout = self._layout
        own = layout.slices[bucket][owner] if 0 <= bucket < len(layout) else slice(0, 0)
        size, bytes_in = memoryview(payload).nbytes, FLOAT_BYTES * (own.stop - own.start)
        lent = None if size else self.memory.opened.get(sender)
        is_there = size == bytes_in if lent is None else (node or 0) in range(len(lent.copies))
        if not (bytes_in and is_there):
            raise RemoteProtocolError(f"{size} bytes came for bucket {bucket}")
        if number >= self.traffic.first_round:
            self.traffic.bytes_in[bucket] += bytes_in
        if lent is not None:
            return lent.means[bucket] if node is None else lent.copies[node][own]
        return as_tensor(np.frombuffer(payload, dtype="<f4"))

    # The thread.

    def _add(self, bucket: int, node: Node, part: Tensor) -> None:
        """Add a part of this worker's slice; send its mean if it was the last one."""
        tree, root = self._trees[bucket], Node(0, self._workers.count)
        if tree.put(node, part) != root:
            return
        if node == root:  # one process computes for all virtual workers
            self.memory.own.means[bucket].copy_(part.div_(root.stop))
        self._trees[bucket] = self._new_tree(bucket)
        self._send_mean(bucket)

    def _pass_on(self, bucket: int, values: Tensor) -> None:
        """Send values as this worker's slice of the mean."""
        own = self.memory.own.means[bucket].copy_(values)
        self._slice(self._peers.rank, bucket).copy_(own)
        self._send_mean(bucket)

    def _send_mean(self, bucket: int) -> None:
        """Send this worker's slice of the mean, which is in its place, to all others."""
        peers, number = self._peers, self._rounds.round(bucket)
        with peers.monitor:
            self._rounds.take_mean(peers.rank, bucket, number)
            if peers.others:
                mean = self.memory.own.means[bucket]
                self._send(peers.others, "Mean", bucket, (bucket, number), mean)
        peers.links.wake()
        self._note_in_place(bucket)

    def _put(self, bucket: int, place: slice, mean: Tensor) -> None:
        """Put another owner's slice in its place."""
        self.memory.own.copies[0][place].copy_(mean)
        self._note_in_place(bucket)

    def _note_in_place(self, bucket: int) -> None:
        with self._peers.monitor:
            if self._rounds.put(bucket):
                for index in self._layout.tensors[bucket]:
                    if all(self._rounds.has_ended(each) for each in self._layout.of[index]):
                        self.traffic.transit.arrive(index)
                self._peers.monitor.notify()
