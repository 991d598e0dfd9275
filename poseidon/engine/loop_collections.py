"""Collections among the workers of a group, and the position of this worker's loop.

Law: all workers make the same calls of a group that wait for all others, in the same order, after
equally many iterations. The payload of each collection begins with the worker's call, so that
different calls which meet are an error on every worker, with both in its sentence.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poseidon.base.call_names import DISTRIBUTE, LEAVING, STEP, LoopPosition
from poseidon.engine.memory import is_failure
from poseidon.engine.session import TrainingSession
from poseidon.errors import UsageError, described
from poseidon.exchange.job_control import SAME_CALLS, JobControl
from ps_server import PeerLeft, PeerLost, PeerUnreachable
from ps_server.errors import found_in

HEAD = re.compile(rb"(\w+) (\d+) ([^\n]*)\n", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A call of a group on one worker, which waits for the others.

    Attributes:
        name: of the method; `LEAVING` for the end of the `with` block.
        iterations: that this worker has ended before.
        place: where in its loop the worker calls it, for messages.
    """

    name: str
    iterations: int = 0
    place: str = ""

    def __str__(self) -> str:
        act = "leaves the `with` block" if self.name == LEAVING else f"calls {self.name}()"
        return f"{act} {self.place}".rstrip()

    def meets(self, other: GroupCall) -> bool:
        """Return whether the two belong together."""
        return (self.name, self.iterations) == (other.name, other.iterations)


class LoopCollections:
    """Collections of one worker with all others.

    Args:
        session: of this worker's loop, which counts.
        on_progress: called after each step and at the beginning and end of each wait for others.
    """

    def __init__(
        self,
        session: TrainingSession,
        control: JobControl,
        on_progress: Callable[[LoopPosition], None],
    ) -> None:
        self._session = session
        self._control = control
        self.on_progress = on_progress
        self._call: GroupCall | None = None

    @property
    def name(self) -> str:
        """The name of the call that makes collections now."""
        assert self._call is not None
        return self._call.name

    def finish_step(self) -> None:
        self._session.steps += 1
        self.report()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Give the collections inside the block the name of the call that makes them.

        A nested call has the name of the outer call.

        Raises:
            PeerLost: another worker has left or is lost.
        """
        if self._call is not None:
            yield
            return
        self._call = GroupCall(name=name, place=self._session.place)
        try:
            yield
        except PeerLeft as left:
            raise PeerLost(
                f"worker {self._session.rank} {self._call}, but worker {left.worker} has left; "
                f"{SAME_CALLS}"
            ) from left
        except PeerUnreachable:
            raise
        except PeerLost as lost:
            raise PeerLost(f"worker {self._session.rank} {self._call}: {lost}") from lost
        finally:
            self._call = None

    @contextmanager
    def ending_iteration(self, finished: Callable[[], int]) -> Iterator[None]:
        """Report that this worker ends an iteration inside the block, and count the iteration.

        Args:
            finished: returns the job's finished iterations, after the block.
        """
        # which may not wait for the others: then their order may differ
        self.on_progress(replace(self._session.position(STEP), loop=None))
        yield
        self._session.end_iteration(finished())
        self.report()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Report that this worker's call waits for all others inside the block."""
        name = self.name
        self._session.collections += name not in (STEP, DISTRIBUTE)
        self.report("" if name == STEP else name)  # the iteration of such a step has ended
        try:
            yield
        finally:
            self.report()

    @contextmanager
    def leaving(self, error: BaseException | None) -> Iterator[None]:
        """Report that an exception has ended the `with` block of this worker, which waits inside this
        block until the others have left theirs: a collection for those that have not.

        What the exchange has raised, such as the loss of a worker, the launcher knows already.
        """
        if error is None or not is_failure(error) or found_in(error):
            yield
            return
        self._session.collections += 1
        place = traceback.extract_tb(error.__traceback__, 1)
        where = "".join(f"{Path(frame.filename).name}, line {frame.lineno}: " for frame in place)
        position = self._session.position(LEAVING)
        self.on_progress(replace(position, raised=f"{where}{described(error)}"))
        try:
            yield
        finally:
            self.report()

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all workers by rank. All workers make the same call.

        Raises:
            UsageError: another worker makes another call, or after more or fewer iterations.
        """
        assert self._call is not None
        head = f"{self._call.name} {self._session.iterations} {self._call.place}\n"
        with self.waiting():
            parts = self._control.all_gather(head.encode() + payload)
        calls, bodies = zip(*map(_split, parts), strict=True)
        for rank, call in enumerate(calls):
            if not call.meets(calls[0]):
                raise UsageError(f"worker 0 {calls[0]}, but worker {rank} {call}; {SAME_CALLS}")
        return bodies

    def mean(self, numbers: Tensor) -> NDArray[np.float64]:
        """Return the mean over all workers of a tensor's numbers, in its shape.

        Raises:
            UsageError: the workers do not all call it, or have not given as many numbers.
        """
        with self.calling("mean"):
            parts = self.gather(numbers.double().cpu().numpy().tobytes())
        for rank, part in enumerate(parts):
            if len(part) != len(parts[0]):
                counts = len(parts[0]) // 8, len(part) // 8
                raise UsageError(
                    f"worker 0 gives mean() {counts[0]} numbers, but worker {rank} gives "
                    f"{counts[1]}; all workers must give the same number"
                )
        mean: NDArray[np.float64] = np.mean(
            [np.frombuffer(part, np.float64) for part in parts], axis=0
        )
        return mean.reshape(numbers.shape)

    def report(self, current: str = "") -> None:
        """Report the position of this worker, and the call in which it waits for others."""
        self.on_progress(self._session.position(current))


def _split(part: bytes) -> tuple[GroupCall, bytes]:
    """Return the call and the payload of a worker; without a head it is a barrier of a step."""
    head = HEAD.match(part)
    if head is None:
        return GroupCall(name=STEP), part
    name, iterations, place = (text.decode() for text in head.groups())
    return GroupCall(name=name, iterations=int(iterations), place=place), part[head.end() :]
