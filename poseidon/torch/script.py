"""One worker of `poseidon run`: a script of the user's, which joins the job with
`poseidon.distribute`.

Law: the connection to the launcher is private. Before the script runs, its standard streams are
replaced (`poseidon.engine.process.launcher_streams`, `output_to_log`). It reads
nothing; the one worker of a job on the launcher's host reads what the launcher reads. What it
writes goes to the worker's log. Standard error goes to the launcher too; so may standard output.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed

from poseidon.base.paths import module_file
from poseidon.engine.document import Prints, ScriptDocument
from poseidon.engine.launcher_connection import WORKERS, LauncherConnection
from poseidon.engine.memory import EndOfStart, ScriptMemory, Snapshot, StartEnded
from poseidon.engine.own_time import OwnTime
from poseidon.engine.this_process import current_line, place_of, running_in
from poseidon.engine.work import NOTHING, TrainingWork, loss_of
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import PoseidonError
from poseidon.exchange.base import forget_meshes
from poseidon.torch.ddp import ddp_script, default_group
from poseidon.torch.process_group.functions import register
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.work import Calls
from poseidon.torch.script_hooks import (
    counting_steps,
    ended_alone,
    noticing_lone_steps,
    taking_from_trainer,
)
from poseidon.torch.script_output import output_to_log
from poseidon.torch.script_process import (
    ExitedAtOnce,
    call_excepthook,
    exits_by_error,
    free_address,
    import_compiler_late,
    run_script,
    search_as_plain_python,
    silent_excepthook,
    torchrun_variables,
)
from poseidon.torch.script_start import StartOfScript
from poseidon.torch.spawned import this_machine
from poseidon.torch.spawning import ScriptPlace
from ps_server import ServerError
from ps_server.errors import found_in
from ps_server.trace import NO_TRACE, Tracer

LOGGER = logging.getLogger("poseidon.torch.script")


class ScriptEnded(PoseidonError):
    """The script has ended itself with an exit code other than 0.

    Args:
        code: an exit code, or what Python prints before it exits with 1.
    """

    def __init__(self, code: object) -> None:
        super().__init__(f"the script ended itself with {code!r}")
        self.exit_code = code if isinstance(code, int) else 1


class NeedsOthers(EndOfStart):
    """A script that is prepared beside its job has come to the first call that waits for others."""


class ScriptWork(TrainingWork[ScriptDocument]):
    """One worker of `poseidon run`, from its document to the end of the script."""

    document_class = ScriptDocument
    notes = MappingProxyType(
        {
            "stop": "asked to stop: the job ends after a step that all workers reach; a second "
            "request ends it at once",
            "snapshot": "asked for a snapshot: group.snapshot_wanted becomes True after a step "
            "that all workers reach; a script of DistributedDataParallel saves by "
            "itself",
        }
    )

    def __init__(self, document: ScriptDocument, launcher: LauncherConnection) -> None:
        super().__init__(document, launcher)
        self.has_joined = False
        """Whether something has connected the workers."""
        self._memory: ScriptMemory | None = None
        self._own_time: OwnTime | None = None
        self._file = str((document.module and module_file(document.script)) or document.script)

    def location(self, error: BaseException) -> str:
        """See `Work`: the script, with the line if there is one."""
        return place_of(error, self._file)

    def run(self) -> Mapping[str, object]:
        """Run the script. Its exceptions are raised unchanged.

        A worker that pauses runs it once more, from a memory snapshot.
        """
        import_compiler_late()
        search_as_plain_python(self.document)
        stdout = os.dup(1)  # `output_to_log` replaces it
        while not self.has_ended(self._run_start):
            os.dup2(stdout, 1)
            gc.unfreeze()
            gc.collect()  # what the script had
        return NOTHING if self.has_joined else ended_alone(self.document)

    @property
    def newest_kept(self) -> Snapshot[bytes] | None:
        return None if self._memory is None else self._memory.newest

    def _note_joined(self) -> None:
        self.has_joined = True

    def lost(self, error: Exception) -> ServerError | None:
        """See `TrainingWork`: the script may have raised one of its own because of it."""
        return found_in(error)

    def _run_start(self) -> None:
        document, before = self.document, self._memory
        self._memory = None
        self._own_time = self.own_time() if document.balances else None
        if document.copies:
            self._memory = ScriptMemory(
                holds=document.holds_snapshots,
                rewind=document.rewind,
                every=document.memory_snapshot_every,
                newest=None if before is None else before.at(document.rewind),
                holds_part=document.is_on_holder,
                on_begin=(lambda: None) if self._own_time is None else self._own_time.begin,
            )
        with output_to_log(document.log_file, document.prints):
            self.launcher.send("ready")
            self._run_script()
        error = self.launcher.interruption.error
        if document.copies and error is not None:  # the script has caught it, and ended
            raise error

    def prepare(self) -> None:
        """Run the script beside its job, up to the first call that waits for others: later it finds
        what it imports and reads.
        """
        with output_to_log(self.document.log_file, Prints.LOG), suppress(NeedsOthers):
            self._run_script()

    def _addresses(self, exchange: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
        def refuse(own: str = "") -> list[str]:
            raise NeedsOthers

        return refuse if self.document.aside else exchange

    def _run_script(self) -> None:
        document = self.document
        trace = NO_TRACE if document.aside else self.open_trace()
        sys.argv = ["-m" if document.module else document.script, *document.arguments]
        try:
            with (
                self._joining(trace) as context,
                self._place() as place,
                running_in(context),
                self._process_group(context) as undo,
                silent_excepthook(),
            ):
                try:
                    with nullcontext() if place is None else place.spawns(undo), exits_by_error():
                        run_script(document)
                except SystemExit as end:
                    self.ends_at_once = isinstance(end, ExitedAtOnce)
                    if end.code not in (None, 0):
                        context.fail(end)
                        raise
                except BaseException as error:
                    if context.is_failure(error):
                        context.fail(error)
                        lost = found_in(error)
                        if lost is None or not self.pauses_after(lost):
                            call_excepthook(error, self._file)
                    raise
        except StartEnded as end:
            raise end.error from None
        except KeyboardInterrupt as stop:
            if context.is_failure(stop):
                raise
            LOGGER.info("the script has ended: %s", stop or "interrupted")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptEnded(end.code).with_traceback(end.__traceback__) from end

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part in the job inside the block, for a process that the script has started. The
        master's address stays as the script has set it.
        """
        own = torchrun_variables(self.document, ":")
        os.environ.update(
            {name: value for name, value in own.items() if not name.startswith("MASTER_")}
        )
        with (
            self._joining(self.open_trace()) as context,
            running_in(context),
            self._process_group(context),
        ):
            yield

    @contextmanager
    def _place(self) -> Iterator[ScriptPlace | None]:
        """Set the variables of torchrun, and let the script start its workers itself."""
        if not self.document.ddp:
            yield None
            return
        with closing(ScriptPlace(self.document, self.launcher)) as place:
            place.open(self._set_variables())
            try:
                yield place
            finally:
                self.has_joined |= place.was_taken

    @contextmanager
    def _process_group(self, context: WorkerContext) -> Iterator[ExitStack]:
        """Give the script a process group of torch.distributed, whose workers connect at the first
        collective.
        """
        mesh = Mesh(
            context.member.network,
            self._addresses(partial(self.launcher.exchange_addresses, among=WORKERS)),
            on_failure=self._report_collective,
            place=partial(current_line, self._file),
            neighbours=context.member.host_ranks,
        )
        register(mesh, Calls(context.report_call))
        is_first_of_several = context.rank == 0 and context.size > 1
        try:
            with (
                ddp_script(mesh, context) if self.document.ddp else default_group(mesh) as undo,
                ExitStack() as own,
            ):
                stack = undo or own
                stack.enter_context(taking_from_trainer(context.job.log))
                if context.size == 1:
                    stack.enter_context(counting_steps(context))
                if is_first_of_several:
                    stack.enter_context(
                        noticing_lone_steps(
                            self.document, lambda: self.has_joined or mesh.is_connected
                        )
                    )
                yield stack
            mesh.end()  # first: a worker that waits for a call of this one does not leave these
            for reducer in context.reducers:
                reducer.close()  # before `flush`: others leave the store once rank 0 has left these
            mesh.flush()
            self.has_joined |= mesh.is_connected
        finally:
            for reducer in context.reducers:
                reducer.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            forget_meshes()
            mesh.close()

    def _set_variables(self) -> list[str]:
        """Set the variables of torchrun. They stay: a script may read them in a thread that it does
        not end, or as Python exits. Return `this_machine` of each worker.
        """
        document = self.document
        exchange = self._addresses(partial(self.launcher.exchange_addresses, among=WORKERS))
        told = exchange(f"{free_address(document.member.network.host)} {this_machine()}")
        masters, machines = zip(*(one.split(" ", 1) for one in told), strict=True)
        os.environ.update(torchrun_variables(document, masters[0]))
        return list(machines)

    def _report_collective(self, error: Exception) -> None:
        """End the job after the error of a collective, which a library may catch: others would wait
        for this worker.
        """
        self.launcher.send("error", message=str(error), exit_code=1, **loss_of(error))

    @contextmanager
    def _joining(self, trace: Tracer) -> Iterator[WorkerContext]:
        """Yield the context of a start of the script, whose last values are reported after it."""
        document = self.document
        job = StartOfScript(self, trace, self._own_time, on_opened=self._note_joined)
        context = WorkerContext(
            device=self.device,
            member=self.membership(),
            connect=self._addresses(self.launcher.exchange_addresses),
            job=job,
            folder=Path(document.output),
            checkpoint=Path(document.snapshot) if document.snapshot else None,
            unfit_for_ddp=document.unfit_for_ddp,
            threads_given=document.threads_given,
            memory=self._memory,
        )
        try:
            with closing(trace):
                yield context
        finally:
            job.close()
