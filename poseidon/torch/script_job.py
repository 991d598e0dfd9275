"""The job of `poseidon run`: it runs a script of the user's on every worker."""

from __future__ import annotations

import ast
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from poseidon.base.foreign_files import read_definition
from poseidon.base.paths import module_file, no_module, own_command, short_path
from poseidon.cluster.host_probe import HostNeeds
from poseidon.cluster.job_plan import JobPlan, WorkerPlan, devices_from_flag
from poseidon.cluster.machinefile import Host
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import JobResult, Outcome, SignalEffect
from poseidon.engine.document import Prints, ScriptDocument, WorkKind
from poseidon.engine.snapshot_files import sums_path
from poseidon.engine.snapshot_runs import CHECKPOINT
from poseidon.errors import JobError, UsageError, counted
from poseidon.flags.flag import title_of
from poseidon.launcher.closing_lines import resume_command, without_flags
from poseidon.launcher.job import FRAGMENTS_TRAVEL, Job, other_iteration
from poseidon.launcher.job_folder import find_snapshot
from poseidon.launcher.processes import Start
from poseidon.launcher.request import ScriptRequest, ShownLogs
from poseidon.launcher.site import FileSet, Site
from poseidon.launcher.terminal import on_one_terminal
from ps_server.json_fields import fields_of

if TYPE_CHECKING:
    from poseidon.torch.checkpoint_file import CheckpointHead


class ScriptJob(Job):
    """A job that runs a script; see `Job`.

    Raises:
        PoseidonError: there is no such script or checkpoint, or a mistake in the flags.
    """

    kind = WorkKind.SCRIPT
    own_stdout = True
    restarts_by_itself = False  # a script that saves nothing starts from its own beginning
    takes_snapshots = False
    request: ScriptRequest

    def __init__(self, request: ScriptRequest, site: Site) -> None:
        _check_script(request, site)
        devices = devices_from_flag(request.gpu, count_gpus=site.visible_gpus)
        if request.ddp and devices not in (("cpu",), first_gpus(len(devices))):
            raise UsageError(
                f"--gpu={request.gpu} cannot be combined with --ddp, whose scripts take the GPU of "
                "their LOCAL_RANK; use --gpu=0,1,..., and CUDA_VISIBLE_DEVICES for other GPUs"
            )
        if request.ddp:
            check_ddp(request)
            _check_gpus_of_hosts(site.hosts)
            self.origin = StartingPoint(is_scripts=True)
        self._resumed = None
        if request.snapshot:
            snapshot = find_snapshot(request.snapshot, CHECKPOINT)
            self._resumed = _read_head(snapshot)
            state = str(snapshot.absolute())
            self.origin = StartingPoint(state=state, iteration=self._resumed.steps)
        super().__init__(
            request, site, title=request.script.name, stem=_stem(request), devices=devices
        )

    @property
    def bound_because(self) -> str:
        """See `Job`: a script with virtual workers gets their batches from the job. Those that are
        written for DistributedDataParallel have one worker each.
        """
        if self.request.ddp:
            return "its script is for DistributedDataParallel (--ddp)"
        if self.request.exchange.streams:
            return FRAGMENTS_TRAVEL
        return "" if self.request.virtual_workers is not None else "it has no --virtual_workers"

    @property
    def exchange_plan(self) -> str:
        given, resumed = super().exchange_plan, self._resumed
        if given or resumed is None or resumed.workers != self.virtual_workers.count:
            return given
        return resumed.exchange_plan

    def usual_virtual_workers(self, plan: JobPlan) -> int:
        """See `Job`: as many as the checkpoint has, if its script was told their number and each
        worker gets one.
        """
        resumed = self._resumed
        if resumed is None or not resumed.has_virtual or self.request.ddp:
            return plan.worker_count
        return max(resumed.workers, plan.worker_count)

    def check_virtual_workers(self, count: int, plan: JobPlan) -> None:
        """See `Job`: a script of DistributedDataParallel has one batch of each worker at a time."""
        super().check_virtual_workers(count, plan)
        if self.request.ddp and count != plan.worker_count:
            raise UsageError(
                f"--virtual_workers={count} cannot be combined with --ddp on "
                f"{counted(plan.worker_count, 'worker')}; use "
                f"--virtual_workers={plan.worker_count}, or poseidon.distribute"
            )

    @property
    def plans_by_number(self) -> bool:
        resumed = self._resumed
        if resumed is None or not resumed.has_virtual:
            return super().plans_by_number
        return super().plans_by_number or resumed.workers == self.virtual_workers.count

    def usual_threads(self, role: WorkerPlan) -> int:
        return 1 if self.plans_by_number else super().usual_threads(role)

    def final_report(
        self, result: JobResult, newest: StartingPoint, scores: Sequence[str]
    ) -> list[tuple[str, str]]:
        report = super().final_report(result, newest, scores)
        if not newest.state:
            return report
        state, other = Path(newest.state), other_iteration(newest, result)
        if result.outcome is Outcome.FINISHED:  # resumed, the script would find nothing left to do
            where = f" (of {other})" if other else ""
            return [("checkpoint", short_path(state) + where), *report]
        return [(f"resume from {other}" if other else "resume", self.resume_line(state)), *report]

    def _resume_command(self, changes: Mapping[str, str]) -> str:
        if not self.request.argv:  # of launch()
            words = [f"{name}={value!r}" for name, value in changes.items()]
            return f"poseidon.launch({', '.join([_stem(self.request), *words])})"
        own, of_script = self._argv()
        return f"{resume_command(own, changes)} {shlex.join(of_script)}"

    def _argv(self) -> tuple[list[str], list[str]]:
        """Return this command's own arguments, and the script with its arguments."""
        argv, kept = list(self.request.argv), len(self.request.arguments) + 1
        kept += "-m" in argv[:-kept][-1:]
        return argv[:-kept], argv[-kept:]

    def background_argv(self, added: Sequence[str]) -> list[str]:
        """See `Job`. The script and its arguments stay last, and as they are."""
        own, of_script = self._argv()
        return [*without_flags(own, ["background"]), *added, *of_script]

    def document(self, role: WorkerPlan, start: Start) -> ScriptDocument:
        state = start.point.state
        return ScriptDocument(
            **fields_of(self.worker_document(role, start)),
            script=str(self.request.script)
            if self.request.module
            else self.site.sent_path(role.host, self.request.script.absolute()),
            arguments=self.request.arguments,
            module=self.request.module,
            ddp=self.request.ddp,
            unfit_for_ddp=unfit_for_ddp(self.request),
            threads_given=self.request.threads is not None,
            prints=self._prints(role),
            restarts=start.attempt,
            max_restarts=self.max_restarts,
            snapshot=self.site.sent_path(role.host, Path(state)) if state else "",
        )

    def _prints(self, role: WorkerPlan) -> Prints:
        """Return where a worker's standard output goes: rank 0's to the launcher's.

        On a terminal its order among the lines of standard error matters, so the two are one
        stream.
        """
        if role.rank == 0 and not on_one_terminal():
            return Prints.STDOUT
        return (
            Prints.STDERR
            if role.rank == 0 or self.request.show_logs is ShownLogs.ALL
            else Prints.LOG
        )

    def files(self, point: StartingPoint) -> Sequence[FileSet]:
        """See `Job`.

        The script itself is sent; modules, its own among them, must be there.
        """
        sets = [] if self.request.module else [(self.request.script.absolute(),)]
        if not point.state:
            return sets
        state = Path(point.state)
        return [*sets, (*(path for path in (sums_path(state),) if path.exists()), state)]

    def needs(self, host: Host) -> HostNeeds:
        needs = super().needs(host)
        works = any(worker.host.id == host.id for worker in self.plan.workers)
        if not (works and self.request.module):
            return needs
        return replace(needs, runs=str(self.request.script))


def _check_script(request: ScriptRequest, site: Site) -> None:
    """Refuse what is not there. Hosts that have modules of their own are asked for it.

    Raises:
        UsageError: says what was expected.
    """
    script, found = request.script, module_file(str(request.script))
    if request.module:
        if found is None and site.opens_files_here:
            raise UsageError(no_module(str(script)))
        if found is not None:
            _check_syntax(found, site)
        return
    if script.is_dir():
        raise UsageError(f"{script} is a folder; expected a script")
    if not script.is_file():
        hint = "" if found is None else f"; expected -m {script}, which is a module"
        raise UsageError(f"there is no script {script}{hint}")
    if script.suffix == ".prototxt":
        raise UsageError(
            f"{script} is a definition of Caffe, not a Python script; train a solver with: "
            f"{own_command()} train --solver={shlex.quote(str(script))}"
        )
    if script.suffix == ".ipynb":
        raise UsageError(
            f"{script} is a notebook, not a Python script; call poseidon.launch() in it, or make a "
            f"script of it: jupyter nbconvert --to script {shlex.quote(str(script))}"
        )
    _check_syntax(script, site)


def _check_syntax(script: Path, site: Site) -> None:
    """Raise JobError for a script that is not Python; hosts with another Python may know more."""
    try:
        content = read_definition(script)
    except OSError as error:
        raise JobError(f"cannot read the script {script}: {error.strerror}") from error
    theirs = not site.opens_files_here and any(host.python for host in site.hosts)
    if theirs or b"\0" in content:  # which a compiled script or an archive has
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own run shows them
            ast.parse(content, str(script))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise JobError(
            f"{short_path(script)}{line}: {type(error).__name__}: {error.msg}"
        ) from error


def _stem(request: ScriptRequest) -> str:
    return request.script.name.rpartition(".")[2] if request.module else request.script.stem


def check_ddp(request: ScriptRequest) -> None:
    """Refuse what a script of DistributedDataParallel cannot have.

    Raises:
        UsageError: names the flag, and what to do.
    """
    request.exchange.check_ddp()
    if sentence := unfit_for_ddp(request):
        raise UsageError(sentence)


def unfit_for_ddp(request: ScriptRequest) -> str:
    """Return a sentence on a flag that would have no effect on a script of DistributedDataParallel;
    empty: there is none.
    """
    if request.snapshot:
        return (
            f"--snapshot={request.snapshot} is for group.resume(), but a script of "
            "DistributedDataParallel loads its own checkpoint; pass the path as an argument of "
            "the script"
        )
    if request.sigint_effect is SignalEffect.SNAPSHOT:
        return (
            "--sigint_effect=snapshot cannot be combined with DistributedDataParallel, whose "
            "scripts save by themselves; use stop or none"
        )
    for name in ("elastic", "memory_snapshot_every", "min_workers", "max_rejoins"):
        value, usual = getattr(request, name), _USUAL[name]
        if value not in (usual, 0):
            return (
                f"{title_of(ScriptRequest, name)}={value} cannot be combined with "
                "DistributedDataParallel, whose jobs take no snapshots in memory; use "
                "--max_restarts=N, or poseidon.distribute"
            )
    return ""


_USUAL = {entry.name: entry.default for entry in fields(ScriptRequest)}


def first_gpus(count: int) -> tuple[str, ...]:
    """Return the first GPUs of a host, as `devices_from_flag` names them."""
    return tuple(f"cuda:{number}" for number in range(count))


def _check_gpus_of_hosts(hosts: Sequence[Host]) -> None:
    """Refuse hosts whose workers have other GPUs than their scripts would take."""
    for host in hosts:
        devices = () if host.gpus in (None, "cpu") else devices_from_flag(host.gpus)
        if devices != first_gpus(len(devices)):
            raise UsageError(
                f"gpus={host.gpus} of client {host.id} on {host.name} cannot be combined with "
                "--ddp, whose scripts take the GPU of their LOCAL_RANK; use gpus=0,1,..., and "
                "CUDA_VISIBLE_DEVICES on that machine for other GPUs"
            )


def _read_head(snapshot: Path) -> CheckpointHead:
    # imports torch, which a job that does not resume does not need
    from poseidon.torch.checkpoint_file import read_head

    return read_head(snapshot)
