"""The job of a script: what its last lines say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from poseidon.cli.jobs import job_request
from poseidon.cli.main import parse_arguments
from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.machinefile import Host
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import JobResult, Outcome
from poseidon.engine.document import Prints, ScriptDocument, read_document
from poseidon.engine.leaf import packed
from poseidon.errors import UsageError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.options import ExchangeOptions, Scheme
from poseidon.flags.flag import flags_of
from poseidon.launcher.processes import Start
from poseidon.launcher.request import Encrypt, ScriptRequest, ShownLogs
from poseidon.launcher.site import Site
from poseidon.torch.checkpoint_file import write_checkpoint
from poseidon.torch.ddp import reduce_by_exchange
from poseidon.torch.script import ScriptWork
from poseidon.torch.script_job import ScriptJob
from ps_server.trace import NO_TRACE


@pytest.mark.parametrize(
    ("shown", "terminal", "expected"),
    [
        (ShownLogs.FIRST, False, [Prints.STDOUT, Prints.LOG]),
        (ShownLogs.FIRST, True, [Prints.STDERR, Prints.LOG]),
        (ShownLogs.ALL, False, [Prints.STDOUT, Prints.STDERR]),
        (ShownLogs.ALL, True, [Prints.STDERR, Prints.STDERR]),
    ],
)
def test_where_a_script_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: ShownLogs,
    terminal: bool,
    expected: list[Prints],
) -> None:
    monkeypatch.setattr("poseidon.torch.script_job.on_one_terminal", lambda: terminal)
    script = tmp_path / "train.py"
    script.write_text("")
    request = ScriptRequest(script=script, show_logs=shown, workers=2)
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site:
        job = ScriptJob(request, site)
        site.prepare(job.id, job.needs)
        start = Start.new(1, StartingPoint(), job.plan, Encrypt.AUTO)
        assert [job.document(role, start).prints for role in job.plan.workers] == expected


@pytest.mark.parametrize(
    ("gpu", "is_legal"), [("", True), ("0,1", True), ("1,3", False), ("1,0", False)]
)
def test_a_script_of_ddp_takes_the_first_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, is_legal: bool
) -> None:
    monkeypatch.setattr(Site, "visible_gpus", lambda _: 4)
    script = tmp_path / "train.py"
    script.write_text("")
    request = ScriptRequest(script=script, gpu=gpu, ddp=True)
    refused = nullcontext() if is_legal else pytest.raises(UsageError, match="use --gpu=0,1")
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site, refused:
        assert ScriptJob(request, site).origin.is_scripts


@pytest.mark.parametrize(
    ("gpus", "is_legal"), [(None, True), ("cpu", True), ("0,1", True), ("2,3", False)]
)
def test_hosts_give_a_script_of_ddp_their_first_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str | None, is_legal: bool
) -> None:
    monkeypatch.setattr(Site, "visible_gpus", lambda _: 4)
    script = tmp_path / "train.py"
    script.write_text("")
    hosts = [Host(id=0, address="127.0.0.1", port=0, gpus=gpus)]
    expected = r"gpus=2,3 of client 0 on 127\.0\.0\.1 .*LOCAL_RANK"
    refused = nullcontext() if is_legal else pytest.raises(UsageError, match=expected)
    with closing(Site(hosts, LocalDialer())) as site, refused:
        ScriptJob(ScriptRequest(script=script, ddp=True), site)


@pytest.mark.parametrize(
    ("workers", "is_told", "expected"),
    [(2, True, (0, 2, 4)), (4, True, (0, 1, 2, 3, 4)), (5, True, ()), (2, False, ())],
    ids=["fewer workers", "as many", "more", "of workers only"],
)
def test_the_virtual_workers_that_a_script_takes_over(
    tmp_path: Path, workers: int, is_told: bool, expected: tuple[int, ...]
) -> None:
    state = {"poseidon": 1, "steps": 4, "workers": 4, **({"random": {}} if is_told else {})}
    checkpoint, script = (tmp_path / name for name in ("a_iter_4.pt", "a.py"))
    write_checkpoint(checkpoint, packed(state), 0)
    script.write_text("")
    request = ScriptRequest(script=script, snapshot=str(checkpoint), workers=workers)
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site:
        job = ScriptJob(request, site)
        site.prepare(job.id, job.needs)
        start = Start.new(0, job.origin, job.plan, Encrypt.AUTO)
        document = job.document(job.plan.workers[0], start)
        placed = document.member.virtual_workers
        assert (() if placed is None else placed.bounds) == expected
        assert not expected or document.threads == 1


IN_MEMORY = "whose jobs take no snapshots in memory"
MEAN = "cannot be combined with DistributedDataParallel, whose gradients are the mean"
LOCAL = "needs local steps: give --local_steps=H too"
UNDER_DDP = {
    "--precision=tf32": "",
    "--precision=bfloat16": "torch.autocast",
    "--channels_last=yes": "is for Caffe's nets",
    "--deterministic=yes": "",
    "--exchange=ps": "",
    "--exchange=allreduce": "",
    "--rows=3": "",
    "--staleness=1": MEAN,
    "--consistency=SSP": "",
    "--consistency=SSPAggr --bandwidth_mbps=9": "",
    "--wire_precision=bfloat16": "",
    "--compress=int8": "",
    "--compress=auto --loss_budget=0.1": "",
    "--local_steps=3": MEAN,
    "--local_steps=3,quorum=1,grace=1": MEAN,
    "--local_steps=outer_lr=0.5": LOCAL,
    "--local_steps=outer_momentum=0.5": LOCAL,
    "--local_steps=outer_nesterov=no": LOCAL,
    "--local_steps=fragments=2": LOCAL,
    "--local_steps=delay=1": LOCAL,
    "--local_steps=mix=0.1": LOCAL,
    "--wait_free=no": "",
    "--check_replicas=5": "",
    "--on_divergence=mend": "",
    "--virtual_workers=2": "",
    "--virtual_workers=4": "cannot be ",
    "--balance=1": "",
    "--balance=auto": "moves virtual workers at snapshots in memory, but this job takes none",
    "--sigint_effect=none": "",
    "--sigint_effect=snapshot": "whose scripts save by themselves",
    "--sighup_effect=stop": "",
    "--max_restarts=2 --return_timeout=1": "",
    "--stall_timeout=9 --term_deadline=9": "",
    "--elastic=0,every=0": "",
    "--elastic=1": IN_MEMORY,
    "--elastic=every=5": IN_MEMORY,
    "--elastic=min_workers=2": IN_MEMORY,
    "--elastic=max_rejoins=1": IN_MEMORY,
    "--snapshot=FILE": "a script of DistributedDataParallel loads its own checkpoint",
}
"""Flags under --ddp, and the sentence that refuses them; empty: they hold."""
OF_THE_LAUNCHER = """
module hostfile gpu workers output progress threads shards launcher ssh_config address clients
servers resources server_resources timeout encrypt dashboard tensorboard_dir metrics_port
exchange_plan trace logs background job ddp script arguments
"""


def test_the_table_has_all_flags() -> None:
    flags = [*flags_of(ScriptRequest), *flags_of(ExchangeOptions)]
    in_table = set(re.findall(r"(\w+)=", " ".join(UNDER_DDP)))
    assert in_table | set(OF_THE_LAUNCHER.split()) == {flag.name for flag in flags}


@contextmanager
def job_of(folder: Path, *words: str) -> Iterator[ScriptJob]:
    """A job of `poseidon run` with two workers."""
    script, checkpoint = folder / "train.py", folder / "a_iter_4.pt"
    script.write_text("")
    write_checkpoint(checkpoint, packed({"poseidon": 1, "steps": 4, "workers": 2}), 0)
    line = ["run", "--workers=2", *words, str(script)]
    request = job_request(ScriptRequest, parse_arguments(line))
    if request.snapshot:
        request = replace(request, snapshot=str(checkpoint))
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site:
        yield ScriptJob(request, site)


@pytest.mark.parametrize(("flags", "sentence"), UNDER_DDP.items(), ids=str)
def test_a_flag_holds_under_ddp_or_is_refused(flags: str, sentence: str, tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=re.escape(sentence)) if sentence else nullcontext()
    with refused, job_of(tmp_path, "--ddp", *flags.split()):
        pass


OF_ONE_HOST = ("--elastic=1", "--local_steps=3,quorum=1,grace=1")
"""Refused at the start of any job with these hosts."""


@pytest.mark.parametrize(("flags", "sentence"), UNDER_DDP.items(), ids=str)
def test_a_flag_holds_where_a_library_makes_the_module_or_is_refused(
    flags: str, sentence: str, tmp_path: Path
) -> None:
    """Lightning and Fabric, whose jobs have no --ddp, give the same function their modules."""
    refused = pytest.raises(UsageError, match=re.escape(sentence)) if sentence else nullcontext()
    if flags in OF_ONE_HOST:
        refused = pytest.raises(UsageError)
    elif flags == "--balance=auto":
        refused = pytest.raises(UsageError, match="this job takes none")
    with refused, job_of(tmp_path, *flags.split()) as job:
        job.site.prepare(job.id, job.needs)
        start = Start.new(0, job.origin, job.plan, Encrypt.AUTO, job.exchange_plan)
        document = job.document(job.plan.workers[0], start)
        received = read_document(ScriptDocument, document.to_json())
        work = ScriptWork(received, mock.MagicMock())
        with work._joining(NO_TRACE) as context:
            reduce_by_exchange(mock.MagicMock(), context)


def test_the_page_names_what_is_refused_under_ddp() -> None:
    page = (Path(__file__).parents[3] / "docs" / "from_ddp.md").read_text(encoding="utf-8")
    for flags, sentence in UNDER_DDP.items():
        if sentence not in ("", LOCAL):
            name = flags.partition("=")[0]
            assert f"`{name}" in page


PLAN = RecordedPlan(schemes={"fc.weight": Scheme.FACTORS})
GIVEN = RecordedPlan(schemes={"fc.weight": Scheme.SERVER})


@pytest.mark.parametrize(
    ("workers", "given", "expected"),
    [(2, None, PLAN), (3, None, None), (2, GIVEN, GIVEN)],
    ids=["resumed", "another number of workers", "given"],
)
def test_the_plan_that_a_script_takes_over(
    tmp_path: Path, workers: int, given: RecordedPlan | None, expected: RecordedPlan | None
) -> None:
    state = {"poseidon": 1, "steps": 4, "workers": 2, "exchange_plan": PLAN.to_json()}
    checkpoint, script, plan = (tmp_path / name for name in ("a_iter_4.pt", "a.py", "plan.json"))
    write_checkpoint(checkpoint, packed(state), 0)
    script.write_text("")
    if given is not None:
        plan.write_text(given.to_json())
    request = ScriptRequest(
        script=script,
        snapshot=str(checkpoint),
        workers=workers,
        exchange_plan=None if given is None else plan,
    )
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site:
        job = ScriptJob(request, site)
        site.prepare(job.id, job.needs)
        assert job.exchange_plan == ("" if expected is None else expected.to_json())
        start = Start.new(0, job.origin, job.plan, Encrypt.AUTO, job.exchange_plan)
        documents = [job.document(role, start) for role in job.plan.workers]
        schemes = tuple(expected.schemes.values()) if expected else ()
        assert [document.schemes(["fc.weight"]) for document in documents] == [schemes] * workers


@pytest.mark.parametrize(
    ("outcome", "name", "saved", "expected"),
    [
        (
            Outcome.STOPPED,
            "{job}/a_iter_7.pt",
            7,
            ("resume", "poseidon run --snapshot=JOB train.py --lr 0.1"),
        ),
        (
            Outcome.STOPPED,
            "saved/a_iter_5.pt",
            5,
            (
                "resume from iteration 5",
                "poseidon run --snapshot=saved/a_iter_5.pt train.py --lr 0.1",
            ),
        ),
        (Outcome.FINISHED, "saved/a_iter_7.pt", 7, ("checkpoint", "saved/a_iter_7.pt")),
        (
            Outcome.FINISHED,
            "saved/a_iter_5.pt",
            5,
            ("checkpoint", "saved/a_iter_5.pt (of iteration 5)"),
        ),
    ],
)
def test_a_script_that_has_finished_has_nothing_to_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    name: str,
    saved: int,
    expected: tuple[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    argv = ("run", "--snapshot=old", "train.py", "--lr", "0.1")
    request = ScriptRequest(script=Path("train.py"), arguments=("--lr", "0.1"), argv=argv)
    job = ScriptJob(request, Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer()))
    newest = StartingPoint(state=str(tmp_path / name.format(job=job.output)), iteration=saved)
    report = job.final_report(JobResult(outcome=outcome, iteration=7), newest, ())
    assert (report[0][0], report[0][1].replace(job.id, "JOB")) == expected


def test_a_module_stays_beside_its_flag_in_the_command_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    argv = ["run", "--threads=1", "-m", "train", "--epochs", "3"]
    request = job_request(ScriptRequest, parse_arguments(argv))
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site:
        job = ScriptJob(request, site)
        assert job.resume_line(tmp_path / "a_iter_4.pt") == (
            "poseidon run --threads=1 --snapshot=a_iter_4.pt -m train --epochs 3"
        )
