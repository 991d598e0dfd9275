"""The job of a script: what its last lines say."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from poseidon.cluster.dial.local import LocalDialer
from poseidon.cluster.machinefile import Host
from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import Outcome
from poseidon.engine.document import Prints
from poseidon.engine.module.checkpoint_file import packed, write_checkpoint
from poseidon.errors import UsageError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.kinds import Scheme
from poseidon.launcher.processes import Start
from poseidon.launcher.request import Encrypt, ScriptRequest, ShownLogs
from poseidon.launcher.script_job import ScriptJob
from poseidon.launcher.site import Site


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
    monkeypatch.setattr("poseidon.launcher.script_job.on_one_terminal", lambda: terminal)
    script = tmp_path / "train.py"
    script.write_text("")
    request = ScriptRequest(script=script, show_logs=shown, num_app_threads=2)
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
    refused = nullcontext() if is_legal else pytest.raises(UsageError, match="expected --gpu=0,1")
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site, refused:
        ScriptJob(request, site)


@pytest.mark.parametrize(
    ("workers", "is_told", "ddp", "expected"),
    [
        (2, True, False, (0, 2, 4)),
        (4, True, False, (0, 1, 2, 3, 4)),
        (5, True, False, ()),
        (2, False, False, ()),
        (2, True, True, None),
    ],
    ids=["fewer workers", "as many", "more", "of workers only", "ddp"],
)
def test_the_virtual_workers_that_a_script_takes_over(
    tmp_path: Path, workers: int, is_told: bool, ddp: bool, expected: tuple[int, ...] | None
) -> None:
    state = {"poseidon": 1, "steps": 4, "workers": 4, **({"random": {}} if is_told else {})}
    checkpoint, script = (tmp_path / name for name in ("a_iter_4.pt", "a.py"))
    write_checkpoint(checkpoint, packed(state), 0)
    script.write_text("")
    request = ScriptRequest(
        script=script,
        snapshot=str(checkpoint),
        num_app_threads=workers,
        ddp=ddp,
        virtual_workers=4 if ddp else None,
    )
    sentence = r"--virtual_workers=4 with --ddp on 2 workers: .*; expected --virtual_workers=2, or"
    refused = nullcontext() if expected is not None else pytest.raises(UsageError, match=sentence)
    with closing(Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())) as site, refused:
        job = ScriptJob(request, site)
        site.prepare(job.id, job.needs)
        start = Start.new(0, job.origin, job.plan, Encrypt.AUTO)
        document = job.document(job.plan.workers[0], start)
        assert document.virtual_workers == expected
        assert not expected or document.threads == 1


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
        num_app_threads=workers,
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
