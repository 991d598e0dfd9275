"""A module that all workers of a job train together: what both ways of doing so have in common.

One step of the user's loop, and what happens in it:

    module(x)            the first forward pass begins an iteration; each layer waits for its own tensors
    loss.backward()      each gradient leaves as soon as it is whole
    step()               the iteration ends

Laws:
* All workers call `step`, `settle` and `mean` equally often and in the same order.
* Between `step` and `settle` the module's tensors are the exchange's own, save inside the module's forward pass.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from poseidon.engine.broadcast import broadcast_bytes, broadcast_parameters
from poseidon.engine.module.checkpoint_file import (
    FORMAT,
    checked,
    checkpoint_path,
    newest_checkpoint,
    packed,
    read_checkpoint,
    unpacked,
    write_checkpoint,
)
from poseidon.engine.module.output_watch import OutputWatch
from poseidon.engine.module.sampler import SharedLoader, SharedSampler
from poseidon.engine.module.worker_context import LoopPosition, WorkerContext
from poseidon.engine.module.worker_state import Kept, WorkerState
from poseidon.engine.snapshot_writer import WrittenSnapshot
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.module_hooks import OfOneModule, OutsideOfGraphs, uncompiled
from poseidon.exchange.replicas import NO_CHECK, ReplicaCheck
from ps_server import SignalKind

LOGGER = logging.getLogger(__name__)
Self = TypeVar("Self", bound="Group")
Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What a group keeps together.

    Attributes:
        tensors: for the exchange.
        sources: the module's parameter or buffer behind each of them.
        rest: tensors that are made alike once, by name.
        clip: largest L2 norm of all mean gradients together; None: no limit.
        passes: backward passes a step.
    """

    tensors: list[Trained]
    sources: list[Tensor]
    rest: dict[str, Tensor]
    clip: float | None = None
    passes: int = 1


class Group(ABC):
    """See the module's head.

    Args:
        module: the module.
        together: what of it is kept together.
        context: this worker.
    """

    def __init__(self, module: nn.Module, together: Together, context: WorkerContext) -> None:
        self._module = uncompiled(module)
        self._context = context
        self._options = context.member.options
        self._together = together
        settings = ExchangeSettings(clip=together.clip)
        built = build_exchange(
            together.tensors, settings, context.member, context.connect, trace=context.trace
        )
        self._seen = context.observe(built, module)
        self._exchange = self._seen.exchange
        self._handles: list[RemovableHandle] = []
        self._hooks: Hooks | None = None
        self._outputs: OutputWatch | None = None
        self._check = ReplicaCheck(
            self._options if self.size > 1 else NO_CHECK,
            state=self._replicated,
            collect=self._gather,
            rank=self.rank,
        )
        self._own = WorkerState(self._module, together.rest, self.device)
        self._goes_on_from = context.checkpoint
        self._steps = self._collections = 0
        self._passes = 0  # backward passes of this step that have ended
        self._in_backward = False
        self._begun = False
        self._settled = True
        self._closed = False
        try:
            self._exchange.open(None)
            if self.size > 1:
                broadcast_parameters(list(together.rest.values()), self._gather, rank=self.rank)
            self._watch(module)
        except BaseException:
            self.close()
            raise
        context.on_open(built, self._exchange)

    # -- for the user's loop -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker, 0..size-1."""
        return self._context.worker.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._context.worker.size

    @property
    def device(self) -> torch.device:
        """Where this worker is to compute."""
        return self._context.worker.device

    @property
    def steps(self) -> int:
        """Steps finished."""
        return self._steps

    @property
    def pending(self) -> int:
        """Backward passes since the last step: what `step` would take, and `drop` would forget."""
        return self._passes

    @property
    def stopping(self) -> bool:
        """Whether the job was asked to stop, after a step that all workers have reached together.

        A loop that goes on regardless is ended by a KeyboardInterrupt in its next `step`.
        """
        return self._asked(SignalKind.STOP)

    @property
    def snapshot_wanted(self) -> bool:
        """Whether the job was asked, after this very step, to save what it has."""
        return any(
            s.kind is SignalKind.SNAPSHOT and s.clock == self._steps for s in self._exchange.control.requests
        )

    @abstractmethod
    def step(self) -> None:
        """End the step: every gradient of this worker is there, of as many passes as there were, up to `passes=`."""

    def drop(self) -> None:
        """Forget the backward passes since the last step, and their gradients: a step takes those that follow.

        All workers do it alike, after fewer passes than `passes=`. Running statistics keep what these passes have moved.

        Raises:
            UsageError: the last pass of the step has ended, so its gradients have left.
        """
        if not self._passes:
            return
        if self._in_backward or self._passes >= self._together.passes:
            raise UsageError(
                f"drop() after pass {self._passes} of {self._together.passes}, whose gradients have left; expected step()"
            )
        assert self._hooks is not None
        self._hooks.drop()
        self._passes = 0

    def settle(self) -> None:
        """Bring parameters and statistics to the state after all workers' steps; before evaluating or saving.

        All workers call it together. The module may be read until its next step begins.

        Raises:
            UsageError: a step is under way.
        """
        if self._passes or self._in_backward:
            raise UsageError("settle() stands between a backward pass and its step(); expected after step()")
        if not self._begun:
            with self._meeting("settle" if self._options.staleness else ""):
                self._exchange.settle()
        elif self._options.staleness:
            raise UsageError(
                "settle() comes after a forward pass of the next step; expected right after step()"
            )
        else:
            for index in range(len(self._together.tensors)):
                self._exchange.wait(index)
        self._settled = True

    def mean(self, value: Number) -> Number:
        """The mean over all workers of a number or of a small tensor; of whole numbers a tensor of float64. All workers call
        it together.

        Raises:
            UsageError: the workers have not made as many steps, or not given as many numbers.
        """
        numbers = (
            value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
        )
        tensor = numbers.detach()
        parts = self._meet("mean", tensor.double().cpu().numpy().tobytes())
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(str(len(part) // 8) for part in parts)
            raise UsageError(f"mean() was given {counts} numbers on the workers; expected as many on each")
        mean = np.mean([np.frombuffer(part, np.float64) for part in parts], axis=0).reshape(tensor.shape)
        if isinstance(value, Tensor):
            result = torch.from_numpy(mean).to(tensor.device)
            return result.to(tensor.dtype) if tensor.dtype.is_floating_point else result
        return float(mean)

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> SharedSampler:
        """For a DataLoader: this worker's records of a dataset, another order each epoch.

        Args:
            dataset: anything with a length, the same on every worker.
            shuffle: whether there is an order to draw.
            seed: of the orders.
        """
        sampler = SharedSampler(
            dataset,
            rank=self.rank,
            workers=self.size,
            shuffle=shuffle,
            seed=seed,
            on_return=self._own.return_random,
        )
        self._own.add(sampler)
        return sampler

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **arguments: Any,
    ) -> SharedLoader:
        """A DataLoader of this worker's records, whose place within an epoch is saved exactly.

        Args:
            dataset: with records by number, the same on every worker.
            batch_size: records of a batch of this worker.
            shuffle: whether there is an order to draw.
            seed: of the orders.
            arguments: DataLoader's others, as `num_workers`.
        """
        records: Any = dataset  # a Dataset need not say that it has a length
        sampler = self.sampler(records, shuffle=shuffle, seed=seed)
        return SharedLoader(dataset, sampler, batch_size, **arguments)

    # -- saving and going on -------------------------------------------------------------------------------

    def keep(self, **objects: Kept) -> None:
        """Save and load these as well: a scheduler, a GradScaler, whatever has `state_dict` and `load_state_dict`.

        They are the same on all workers: rank 0's states are saved. Call it before `resume` or `load_state_dict`.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        self._own.keep(objects)

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from, after a step. All workers call it together.

        Parameters and buffers, the rule's histories or the optimizer's state, steps, what `keep` was given, and of each worker
        its samplers' places, random states and buffers of its own.

        Returns:
            On rank 0 all of it, on the CPU, of types that `torch.load(weights_only=True)` reads; on the others nothing.

        Raises:
            UsageError: a step is under way.
        """
        if self._passes or self._in_backward:
            raise UsageError(
                "state_dict() or save() stands between a backward pass and its step(); expected after step()"
            )
        self.settle()
        self._check.run(self._steps)
        first = self._meet("state_dict", self._own.digests())[0]
        own = {**self._own.own(first, rank=self.rank), **self._save_own()}
        parts = self._meet("state_dict", packed(own))
        if self.rank:
            return {}
        return {
            "poseidon": FORMAT,
            "steps": self._steps,
            "workers": self.size,
            "how": self._how,
            **self._own.shared(),
            **self._save_how(),
            "own": [unpacked(part, f"the state of worker {rank}") for rank, part in enumerate(parts)],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` gave. All workers call it together, before the first step.

        Rank 0's state is loaded on all workers; what the others give is not looked at.

        Raises:
            SnapshotError: it is of another module, rule or optimizer, or of another number of workers.
            UsageError: a step has begun.
        """
        content = packed(state) if self.rank == 0 and state is not None else None
        self._load(content, "what load_state_dict() was given")

    def save(self, prefix: str | Path | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint of `state_dict` to `<prefix>_iter_<steps>.pt`, on rank 0's machine. All workers call it together.

        When it has returned on rank 0, the file and its checksums are on disk. A job that starts again goes on from it.

        Args:
            prefix: of its name; None: `checkpoint` in the job's folder.
            keep: how many with this prefix stay, the newest; 0: all.

        Returns:
            Its path.

        Raises:
            SnapshotError: it could not be written; earlier ones are untouched.
            UsageError: a step is under way, or there is no job and no prefix.
        """
        if prefix is None:
            if self._context.folder is None:
                raise UsageError("save() needs a prefix where no job has a folder: save('checkpoints/net')")
            prefix = self._context.folder / "checkpoint"
        prefix = Path(prefix).absolute()
        began_s = time.monotonic()
        state = self.state_dict()
        path = checkpoint_path(prefix, self._steps)
        if self.rank == 0:
            write_checkpoint(path, packed(state), keep)
            seconds = time.monotonic() - began_s
            self._context.on_saved(WrittenSnapshot(state=path, iteration=self._steps, seconds=seconds))
        return path

    def resume(self, prefix: str | Path | None = None) -> bool:
        """Go on from where the job was. All workers call it together, before the first step.

        From the job's own newest checkpoint where it has been started again, else from `--snapshot=` of `poseidon run`, else
        from the newest whole checkpoint with the prefix on rank 0's machine.

        Args:
            prefix: that `save` was given; None: a job without a checkpoint begins.

        Returns:
            Whether there was one: False on a fresh start.

        Raises:
            SnapshotError: as for `load_state_dict`, or the file is damaged.
            UsageError: a step has begun.
        """
        path = self._goes_on_from
        if path is None and prefix is not None and self.rank == 0:
            path = newest_checkpoint(Path(prefix).absolute())
        content = read_checkpoint(path) if self.rank == 0 and path is not None else None
        if not self._load(content, str(path or "the checkpoint"), needed=False):
            return False
        if self.rank == 0:
            LOGGER.info("going on from %s at step %d", path, self._steps)
        return True

    def _load(self, content: bytes | None, source: str, *, needed: bool = True) -> bool:
        """Load rank 0's bytes on all workers; returns whether there are any."""
        if self._steps or self._begun:
            raise UsageError(
                f"a state is loaded before the first step, and this group has begun step {self._steps + 1}; expected "
                "resume() or load_state_dict() right after distribute()"
            )
        shared = broadcast_bytes(
            content, lambda payload: tuple(self._meet("load_state_dict", payload)), rank=self.rank
        )
        if shared is None:
            if needed:
                raise UsageError("load_state_dict() was given nothing on rank 0")
            return False
        state = checked(unpacked(shared, source), source)
        self._check_of_this_job(state, source)
        self._own.load_tensors(state, rank=self.rank)
        self._load_how(state)
        self._steps = state["steps"]
        self._settled = True
        self._goes_on_from = None
        self._own.load_rest(state, rank=self.rank)
        return True

    def _check_of_this_job(self, state: Mapping[str, Any], source: str) -> None:
        if state["how"] != self._how:
            raise SnapshotError(
                f"{source} was trained with {state['how']}, and this script gives distribute() {self._how}"
            )
        if state["workers"] != self.size:
            raise SnapshotError(
                f"{source} was saved by {state['workers']} worker(s), and this job has {self.size}: places in the data and random "
                "states belong to each worker; expected as many, or its 'model' loaded into the module before distribute()"
            )

    def close(self) -> None:
        """Leave the others and take the hooks off the module. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._outputs is not None:
            self._outputs.close()
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
        self._seen.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.settle()
        self.close()

    # -- for the two ways ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _how(self) -> str:
        """What moves the parameters, for messages."""

    @abstractmethod
    def _save_how(self) -> dict[str, Any]:
        """What a checkpoint holds of it; on rank 0."""

    def _save_own(self) -> dict[str, Any]:
        """What a checkpoint holds of it of each worker."""
        return {}

    @abstractmethod
    def _load_how(self, state: Mapping[str, Any]) -> None:
        """Take that, and bring the module's tensors, which are loaded, into the exchange."""

    @abstractmethod
    def _replicated(self) -> dict[str, Tensor]:
        """What is the same on all workers after a step, by name: live tensors."""

    def _rate(self) -> float:
        """The rate of the iteration that begins."""
        return 0.0

    def _end_iteration(self) -> None:
        """Send what has not left, and end the iteration; the step counts as finished.

        Raises:
            UsageError: there was no backward pass.
            KeyboardInterrupt: the job was asked to stop, and the loop has gone on.
        """
        if self._hooks is None:
            raise UsageError("step() after close()")
        if self.stopping:
            raise KeyboardInterrupt(f"the job was asked to stop after step {self._steps}")
        if not self._passes:
            raise UsageError("step() or average_gradients() without a backward pass before it")
        self._hooks.finish()
        self._exchange.finish()
        self._begun = self._settled = False
        self._passes = 0
        self._steps += 1
        self._context.on_progress(LoopPosition(steps=self._steps, collections=self._collections))

    def _before_begin(self) -> None:  # noqa: B027 - nothing to check where an optimizer owns the parameters
        """Check what the script has done since the last step."""

    def _before_run(self) -> None:  # noqa: B027 - an optimizer's parameters change in its step alone
        """Check whether the module may be used now."""

    def _name(self, parameter: Tensor) -> str:
        """A parameter, for messages."""
        names = [f"'{name}'" for name, own in self._module.named_parameters() if own is parameter]
        return names[0] if names else "a parameter that is not the module's"

    def _begin(self) -> None:
        """Begin an iteration."""
        assert self._hooks is not None
        if self._goes_on_from is not None:
            raise UsageError(
                f"the job goes on from {self._goes_on_from}, and the script has begun a step without it; expected "
                "group.resume() before the first step"
            )
        self._before_begin()
        self._begun = True
        self._exchange.start(self._steps, self._rate())
        self._hooks.start()

    # -- within --------------------------------------------------------------------------------------------

    def _asked(self, kind: SignalKind) -> bool:
        return any(
            signal.kind is kind and signal.clock <= self._steps for signal in self._exchange.control.requests
        )

    def _gather(self, payload: bytes) -> tuple[bytes, ...]:
        return self._exchange.control.all_gather(payload)

    def _meet(self, meeting: str, payload: bytes) -> list[bytes]:
        """Collect payloads where the loops of all workers have come equally far."""
        with self._meeting(meeting):
            parts = self._gather(np.int64(self._steps).tobytes() + payload)
        steps = [int.from_bytes(part[:8], sys.byteorder) for part in parts]
        if len(set(steps)) > 1:
            counts = ", ".join(map(str, steps))
            raise UsageError(
                f"{meeting}() was called after {counts} steps on the workers; expected as many on each"
            )
        return [part[8:] for part in parts]

    @contextmanager
    def _meeting(self, meeting: str) -> Iterator[None]:
        """Tell that this worker waits for all others; nothing where there is no name, since it does not."""
        self._collections += bool(meeting)
        here = LoopPosition(steps=self._steps, collections=self._collections)
        self._context.on_progress(replace(here, collection=meeting))
        try:
            yield
        finally:
            self._context.on_progress(here)

    def _watch(self, entry: nn.Module) -> None:
        """Hooks that begin an iteration come before those that use it; those of a compiled module are on its entry alone."""
        module, is_compiled = self._module, entry is not self._module
        together, sources = self._together, set(self._together.sources)
        for source in sources:
            if source.requires_grad:
                self._handles.append(source.register_post_accumulate_grad_hook(self._gradient_is_there))
        self._hooks = Hooks(
            module,
            together.tensors,
            self._exchange,
            passes=together.passes,
            wait_free=self._options.wait_free,
            sources=together.sources,
            entry=entry if is_compiled else None,
            in_backward=self._gradient_is_there,
        )
        self._seen.watch()
        is_read = OfOneModule(self._state_is_read)
        begins = (OutsideOfGraphs if is_compiled else OfOneModule)(self._forward_begins)
        for child in module.modules():
            self._handles.append(child.register_state_dict_pre_hook(is_read))
            own = {*child.parameters(recurse=False), *child.buffers(recurse=False)}
            if child is module or own & sources:
                self._handles.append(child.register_forward_pre_hook(begins, prepend=True))
        if is_compiled:
            begins = OfOneModule(self._forward_begins)
            self._handles.append(entry.register_forward_pre_hook(begins, prepend=True))
        wanting = [source for source in together.sources if source.requires_grad]
        self._outputs = OutputWatch(entry, wanting, self._gradient_is_there)

    def _forward_begins(self, module: nn.Module, arguments: object) -> None:
        self._before_run()
        if not self._begun and (torch.is_grad_enabled() or not self._settled):
            self._begin()

    def _state_is_read(self, *_: object) -> None:
        """A `state_dict` after a step has the values that the next forward pass would see."""
        assert self._hooks is not None
        self._before_run()
        if not self._begun and not self._settled:
            self._begin()
        self._hooks.wait()

    def _gradient_is_there(self, _: Tensor | None = None) -> None:
        if not self._begun:
            self._begin()
        if self._in_backward:
            return
        if self._passes >= self._together.passes:
            raise UsageError(
                f"backward() has run more than {self._together.passes} time(s) without step(); expected step() after "
                "it, or passes= for the number of passes that a step adds up"
            )
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)

    def _backward_is_over(self) -> None:
        assert self._hooks is not None
        self._in_backward = False
        self._passes += 1
        self._hooks.next_pass()
