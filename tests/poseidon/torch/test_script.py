"""How a script's end is reported to the launcher.

The process itself: tests/distributed/test_scripts.py.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from poseidon.engine.document import Prints, ScriptDocument
from poseidon.engine.heartbeat import HeartbeatSender, Watchdog
from poseidon.engine.launcher_connection import WORKERS, LauncherConnection
from poseidon.engine.observation import combined_statistics
from poseidon.engine.process import run_work
from poseidon.engine.this_process import NO_DEBUGGER, refuse_breakpoints
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.torch.script import ScriptWork
from poseidon.torch.script_hooks import STRATEGIES
from poseidon.torch.script_process import search_as_plain_python
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers


class RecordingConnection(LauncherConnection):
    """Records events, and receives no commands."""

    def __init__(self) -> None:
        self.sent = io.StringIO()
        super().__init__(io.StringIO(), self.sent)

    def forward_requests(self, exchange: Exchange, rank: int, *, stop_all: bool = False) -> None:
        """Do nothing."""

    def exchange_addresses(self, own: str = "", *, among: str = WORKERS) -> list[str]:
        """Return this worker's address for all."""
        return [own, own]


@pytest.fixture(autouse=True)
def no_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STRATEGIES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[int, dict[str, Any]]:
    """A script on a worker that is alone: exit code and last event."""
    code, events = events_of(folder, text, monkeypatch, **fields)
    return code, events[-1]


def events_of(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[int, list[dict[str, Any]]]:
    """A script on a worker that is alone: exit code and all events."""
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    given = {"script": str(script), "arguments": ("a", "--b"), "prints": Prints.STDOUT, **fields}
    document = ScriptDocument(job="j", output=str(folder), **given)
    launcher = RecordingConnection()
    with patch.dict(os.environ):  # --ddp leaves torchrun's variables to the process
        code = run_work(ScriptWork(document, launcher))
    events = [json.loads(line) for line in launcher.sent.getvalue().splitlines()]
    assert events[0] == {"event": "ready"}
    return code, events


@pytest.mark.parametrize(
    ("text", "message", "exit_code"),
    [
        ("\nraise ValueError('x')", "worker 0: script.py, line 2: ValueError: x (details in ", 1),
        ("\nraise ValueError('x\\n  y')", "worker 0: script.py, line 2: ValueError", 1),
        ("import sys\nsys.exit(3)", "worker 0: script.py, line 2", 3),
        ("import sys\nsys.exit('no')", "worker 0: script.py, line 2", 1),
        (
            "class Panic(BaseException): pass\nraise Panic('x')",
            "worker 0: script.py, line 2: Panic: x (details in ",
            1,
        ),
        ("x = 1\nif x\n  pass", "worker 0: script.py, line 2: SyntaxError", 1),
        (
            "import poseidon, torch\nposeidon.distribute(torch.nn.ReLU(), poseidon.SGD(lr=1))",
            "worker 0: script.py, line 2: ReLU has no parameter that requires a gradient",
            2,
        ),
    ],
)
def test_a_failure_is_one_sentence(
    text: str, message: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, event = run(tmp_path, text, monkeypatch)
    assert (code, event["event"], event["exit_code"]) == (1, "error", exit_code)
    assert event["message"].startswith(message)


LOOP = """
import torch
import poseidon
model = torch.nn.Linear(2, 1)
with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
    group.resume()
    for (x,) in group.loader(torch.utils.data.TensorDataset(torch.ones(12, 2)), 4):
        model(x).sum().backward()
        group.step()
"""


def test_a_script_of_a_job_that_is_balanced_reports_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its second iteration begins."""
    monkeypatch.setattr("poseidon.engine.own_time.REPORT_S", 0.0)
    code, events = events_of(tmp_path, LOOP, monkeypatch, copies=1, balances=True)
    assert (code, events[-1]["event"]) == (0, "done")
    found = [event for event in events if event["event"] == "timed"]
    assert [times["iterations"] for times in found] == [1, 2, 3]
    assert all(0 < times["own_s"] <= times["whole_s"] for times in found)


def test_a_checkpoint_that_was_sent_has_its_name_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(tmp_path, f"{LOOP}    group.save()\n", monkeypatch)[0] == 0
    (sent,) = tmp_path.glob("*.pt")
    names = {"snapshot": str(sent), "sources": {str(sent): "/runs/a.pt"}}
    with caplog.at_level("INFO"):
        assert run(tmp_path, LOOP, monkeypatch, **names)[0] == 0
    assert "resuming from /runs/a.pt at step 3" in caplog.messages
    sent.write_bytes(b"?")
    _, event = run(tmp_path, LOOP, monkeypatch, **names)
    assert "/runs/a.pt" in event["message"] and str(sent) not in event["message"]


def test_an_error_and_output_with_a_name_that_is_not_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.listdir` gives such names; the traceback in the log must not raise in place of the
    error.
    """
    text = "print('reads', 'caf\\udce9')\nraise RuntimeError('cannot decode caf\\udce9.jpg')"
    _, event = run(tmp_path, text, monkeypatch)
    assert event["message"].startswith("worker 0: script.py, line 2: RuntimeError")
    log = (tmp_path / "worker_0.log").read_text(encoding="utf-8")
    assert (
        log.startswith("reads caf\\udce9\n")
        and "RuntimeError: cannot decode caf\\udce9.jpg\n" in log
    )


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        ("\nbreakpoint()", 2, f"worker 0: script.py, line 2: {NO_DEBUGGER}"),
        # pdb raises it
        ("import bdb\nraise bdb.BdbQuit", 2, f"worker 0: script.py, line 2: {NO_DEBUGGER}"),
        ("import bdb\nraise bdb.BdbQuit", 1, "worker 0: script.py, line 2"),
    ],
)
def test_a_debugger_that_has_nothing_to_read_is_one_sentence(
    text: str, workers: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", None)
    refuse_breakpoints()
    code, event = run(tmp_path, text, monkeypatch, member=Membership(network=Network(size=workers)))
    assert (code, event["event"]) == (1, "error")
    assert event["message"].startswith(message)


@pytest.mark.parametrize("end", ["", "raise SystemExit", "raise SystemExit(0)"])
def test_a_good_end(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("x = 5", encoding="utf-8")
    text = "import sys, beside\nassert sys.argv[1:] == ['a', '--b']\n" + end
    assert run(tmp_path, text, monkeypatch) == (0, {"event": "done"})


def test_a_script_that_ends_its_process_at_once_has_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends once that is reported, without waiting for the script's threads."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    assert run(tmp_path, "import os\nos._exit(0)", monkeypatch) == (0, {"event": "done"})
    assert left == [0]
    code, event = run(tmp_path, "import os\nos._exit(3)", monkeypatch)
    assert (code, event["event"], event["exit_code"], left) == (1, "error", 3, [0])


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGINT)", "raise KeyboardInterrupt"])
def test_an_interrupt_that_nobody_has_asked_for_is_an_error(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, event = run(tmp_path, f"import os, signal\n{end}", monkeypatch)
    assert (code, event["event"]) == (1, "error")
    assert event["message"].startswith("worker 0: script.py, line 2: KeyboardInterrupt (details in")


STOPPED = """
from unittest.mock import patch
import poseidon, torch
group = poseidon.distribute(torch.nn.Linear(2, 1), poseidon.SGD(lr=0.1))
patch.object(type(group._loop.exchanged.exchange.control), "is_asked_to_stop", return_value=True).start()
assert group.stopping
raise KeyboardInterrupt
"""


def test_an_interrupt_of_a_script_that_was_asked_to_stop_is_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        assert run(tmp_path, STOPPED, monkeypatch) == (0, {"event": "done"})
    finally:
        patch.stopall()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(4)", 4, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd\n"),
    ],
)
def test_a_process_that_a_script_forks_ends_as_one_of_plain_python(
    end: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""
import os, sys
child = os.fork()
if child == 0:
    sys.stderr = open("{tmp_path}/said", "w")
    {end or "pass"}
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {status}
"""
    assert run(tmp_path, text, monkeypatch)[0] == 0
    assert (tmp_path / "said").read_text().endswith(said)


def test_a_script_has_its_own_folder_first_and_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain Python does, also where the script is a link to another folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").touch()
    (tmp_path / "link.py").symlink_to("real/script.py")
    monkeypatch.setattr(sys, "path", ["/lib", ""])
    script = str(tmp_path / "link.py")
    search_as_plain_python(ScriptDocument(job="j", output=".", script=script))
    assert sys.path == [str(tmp_path / "real"), "/lib"]


NAMES = """\ufeff# -*- coding: utf-8 -*-
'What it does'
import json
count: int = 0
names = ["__doc__", "__file__", "__name__", "__package__", "__spec__", "__cached__"]
found = [globals()[name] for name in names]
found += [str(type(__builtins__)), type(__loader__).__name__, list(__annotations__)]
with open("found", "w") as file:
    json.dump(found, file)
"""


def test_a_script_has_the_names_that_plain_python_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts ask whether `__package__` is None, and set names of `__builtins__`."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(NAMES, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True, timeout=50)
    expected = Path("found").read_text()
    Path("found").unlink()
    assert run(tmp_path, NAMES, monkeypatch) == (0, {"event": "done"})
    assert Path("found").read_text() == expected
    assert sys.modules["__main__"].count == 0  # what its threads and exit functions pickle


WITHOUT_FLUSH = """
import os, sys
class Tee:
    def __init__(self, stream): self.write = stream.write
sys.stdout, sys.stderr, sys.excepthook = Tee(sys.stdout), None, None
for error in (SystemExit(0), ValueError()):
    if os.fork() == 0:
        raise error
print("said", [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)])
"""


def test_what_a_script_puts_for_its_streams_need_not_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, WITHOUT_FLUSH, monkeypatch) == (0, {"event": "done"})
    assert capfd.readouterr().out in ("said [0, 1]\n", "said [1, 0]\n")


HOOKED = """
import sys
def hook(kind, error, trace):
    with open("said", "w") as file:
        file.write(f"{kind.__name__}: {error}, {trace.tb_frame.f_code.co_name}, {trace.tb_lineno}")
    raise OSError("of the hook")
sys.excepthook = hook
raise ValueError("x")
"""


def test_a_hook_of_the_script_hears_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By such hooks services learn that a run has failed, and scripts log it."""
    monkeypatch.chdir(tmp_path)
    code, event = run(tmp_path, HOOKED, monkeypatch)
    assert (code, Path("said").read_text()) == (1, "ValueError: x, <module>, 8")
    assert event["message"].startswith("worker 0: script.py, line 8: ValueError: x (details in ")


SENDS_ITS_OWN_CLASS = """
import multiprocessing
class Batch:
    size = 3
def send(queue):
    queue.put(Batch())
if __name__ == "__main__":
    processes = multiprocessing.get_context("spawn")
    queue = processes.SimpleQueue()
    process = processes.Process(target=send, args=(queue,))
    process.start()
    with open("said", "w") as file:
        file.write(str(queue.get().size))
    process.join()
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_spawned_process_sends_objects_of_the_scripts_classes(
    module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process of a DataLoader does whose `collate_fn` returns a named tuple."""
    monkeypatch.chdir(tmp_path)
    names = {"script": "script", "module": True} if module else {}
    assert run(tmp_path, SENDS_ITS_OWN_CLASS, monkeypatch, **names) == (0, {"event": "done"})
    assert Path("said").read_text() == "3"


MODULE = """
import json, pickle, sys
from .numbers import THREE
class Value: pass
main = sys.modules["__main__"]
pickle.dumps(Value())
found = [sys.argv, sys.path[0], __file__, __name__, __package__, __spec__.name, main.__spec__.name]
with open("found", "w") as file:
    json.dump([*found, main.__dict__ is globals()], file)
raise ValueError(THREE)
"""


@pytest.mark.parametrize("ddp", [False, True])
def test_a_module_runs_as_python_runs_it(
    ddp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sees is compared with `python -m`; an error names its line."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "numbers.py").write_text("THREE = 3")
    (folder / "train.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "package.train", "a", "--b"]
    assert subprocess.run(command, check=False, capture_output=True, timeout=50).returncode == 1
    expected = Path("found").read_text()
    assert json.loads(expected)[5:] == ["package.train", "package.train", True]
    Path("found").unlink()
    code, event = run(tmp_path, "", monkeypatch, script="package.train", module=True, ddp=ddp)
    assert (code, Path("found").read_text()) == (1, expected)
    assert event["message"].startswith("worker 0: train.py, line 10: ValueError: 3 (details in ")


def test_a_worker_that_never_joins_says_so_to_the_launcher_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one may wait for it in `distribute`."""
    for rank, ddp in ((1, False), (0, False), (0, True)):
        member = Membership(network=Network(rank=rank, size=3))
        end = run(tmp_path, "import sys\nsys.exit(0)", monkeypatch, member=member, ddp=ddp)
        assert end == (0, {"event": "done", "joined": False})
    assert caplog.messages == [
        f"the script has ended without {what}: each of the 3 workers has run it by itself"
        for what in ("poseidon.distribute()", "DistributedDataParallel")
    ]


def test_a_lone_worker_says_that_virtual_workers_had_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for placed in (None, VirtualWorkers((0, 1)), VirtualWorkers((0, 4))):
        member = Membership(virtual_workers=placed)
        assert run(tmp_path, "", monkeypatch, member=member) == (0, {"event": "done"})
    assert caplog.messages == [
        "the script has ended without poseidon.distribute(), so --virtual_workers had no effect"
    ]


@pytest.mark.parametrize(("kind", "says"), [("cpu", "true"), ("meta", None)])
def test_a_script_of_ddp_hears_that_its_device_is_the_cpu(
    kind: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else accelerate trains alone where there is no GPU."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    text = f"import os\nassert os.environ.get('ACCELERATE_USE_CPU') == {says!r}"
    assert run(tmp_path, text, monkeypatch, ddp=True, device=kind) == (0, {"event": "done"})


def test_the_statistics_of_all_groups_are_one_report() -> None:
    first = {"iterations": 5, "tensors": ({"name": "w", "bytes_out": 1},), "other_bytes_out": 10}
    second = {"iterations": 7, "tensors": ({"name": "w", "bytes_out": 2},), "other_bytes_out": 20}
    assert combined_statistics({1: second, 0: first, 2: {}}) == {
        "iterations": 5,
        "tensors": ({"name": "w", "bytes_out": 1}, {"name": "group 2: w", "bytes_out": 2}),
        "other_bytes_out": 30,
    }


SNAPSHOTS = """
import poseidon, torch
model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(6, 2))
with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
    loader = group.loader(data, 2)
    RESUME
    for (x,) in loader:
        model(x).sum().backward()
        group.step()
"""


@pytest.mark.parametrize(("resume", "in_memory"), [("group.resume()", 2), ("", None)])
def test_a_worker_reports_its_newest_memory_snapshot(
    resume: str, in_memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.engine.work.PROGRESS_S", 0.0)
    fields = {"copies": 1, "memory_snapshot_every": 1}
    text = SNAPSHOTS.replace("RESUME", resume)
    _, events = events_of(tmp_path, text, monkeypatch, **fields)
    progress = [event for event in events if event["event"] == "progress"]
    assert progress[-1] == {"event": "progress", "iteration": 3, "in_memory": in_memory}


CATCHES = """
import poseidon, torch
from poseidon.engine.this_process import current_context
from ps_server import PeerLost

model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(6, 2))
caught, interruption = 0, current_context().member.network.interruption

def train():
    global caught
    with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
        loader = group.loader(data, 2)
        group.resume()
        try:
            while True:
                try:
                    for (x,) in loader:
                        loss = model(x).sum()
                        if group.steps == 2:
                            interruption.interrupt(PeerLost("worker 1 has gone"))
                        loss.backward()
                        group.step()
                except Exception as error:
                    assert isinstance(error, PeerLost), error
                    caught += 1
                    if OUTSIDE:
                        raise
        finally:
            print(caught, "caught", flush=True)

try:
    train()
except Exception:
    END
"""


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "raise SystemExit(1)"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_script_that_catches_every_exception_pauses_all_the_same(
    outside: bool,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = CATCHES.replace("OUTSIDE", str(outside)).replace("END", end)
    _, events = events_of(tmp_path, text, monkeypatch, copies=1, memory_snapshot_every=1)
    assert capfd.readouterr().out == "1 caught\n"
    (paused,) = [event for event in events if event["event"] == "paused"]
    assert paused["snapshot"] == 2
    assert paused["message"] == "worker 1 has gone"


LONE_STEPS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("fields", "library", "warns"),
    [
        ({}, "", "so each trains alone; use poseidon.distribute()"),
        ({"ddp": True}, "accelerate", "so each trains alone; use DistributedDataParallel"),
        ({}, "lightning.fabric", "use Fabric(strategy="),
        ({}, "accelerate", "use `poseidon run --ddp`"),
        ({"member": Membership(network=Network(rank=1, size=2))}, "", ""),
        ({"member": Membership()}, "", ""),
    ],
)
def test_an_optimizer_that_steps_alone_is_noticed_at_once(
    fields: dict[str, Any],
    library: str,
    warns: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if library:
        monkeypatch.setitem(sys.modules, library, ModuleType(library))
    fields = {"member": Membership(network=Network(size=2)), **fields}
    code, _ = run(tmp_path, LONE_STEPS, monkeypatch, **fields)
    assert code == 0
    said = [
        record.getMessage() for record in caplog.records if "makes a step" in record.getMessage()
    ]
    assert len(said) == bool(warns)
    assert all(warns in sentence for sentence in said)


STEPS = """
import poseidon, torch
module = torch.nn.Linear(2, 1)
group = poseidon.distribute(module, RULE)
for _ in range(3):
    module(torch.ones(1, 2)).sum().backward()
    group.step()
group.close()
"""


@pytest.mark.parametrize(
    "rule", ["poseidon.SGD(lr=0.1)", "torch.optim.SGD(module.parameters(), lr=0.1)"]
)
def test_the_heartbeat_has_the_waits_of_a_script(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves a second with each look, so that each wait takes one."""
    seconds = itertools.count()
    readings = []

    class Recording(RecordingConnection):
        def __init__(self) -> None:
            super().__init__()
            watchdog = Watchdog(now=lambda: float(next(seconds)))
            self.heartbeat = HeartbeatSender(self.send, watchdog)
            readings.append(watchdog)

    monkeypatch.setattr(sys.modules[__name__], "RecordingConnection", Recording)
    code, _ = run(tmp_path, STEPS.replace("RULE", rule), monkeypatch)
    assert code == 0
    (watchdog,) = readings
    reading = watchdog.read()
    assert reading.waited_s >= 3
    assert watchdog.read().waited_s == reading.waited_s, "no wait is open"
    assert reading.still_s == 0


LOGGING = """
import poseidon, torch
module = torch.nn.Linear(2, 1)
group = poseidon.distribute(module, RULE, virtual_workers=2)
group.log(accuracy=0.25)
for _ in range(2):
    for turn in range(2):
        loss = module(torch.ones(1, 2)).sum()
        group.log(early=turn)
        loss.backward()
        group.log(loss=loss - loss)
        group.step()
        group.log(late=turn)
with torch.no_grad():
    module(torch.ones(1, 2))
group.log(accuracy=0.5)
"""


@pytest.mark.parametrize(
    "rule", ["poseidon.SGD(lr=0.1)", "torch.optim.SGD(module.parameters(), lr=0.1)"]
)
def test_a_groups_values_are_of_the_step_that_they_were_logged_in(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two virtual workers take turns; each logs a value of the step."""
    code, events = events_of(tmp_path, LOGGING.replace("RULE", rule), monkeypatch)
    assert code == 0, events[-1]
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["event"] == "logged":
            for name, value in event["values"].items():
                found.setdefault(name, []).append((event["iteration"], value))
    turns = [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert found == {
        "early": turns,
        "loss": [(iteration, 0.0) for iteration, _ in turns],
        "late": turns,
        "accuracy": [(0, 0.25), (2, 0.5)],
    }


DDP_LOGGING = """
import sys, types
import torch, poseidon
trainer = types.ModuleType("transformers.trainer_callback")
class CallbackHandler:
    def on_log(self, args, state, control, logs):
        return logs
trainer.CallbackHandler = CallbackHandler
sys.modules["transformers.trainer_callback"] = trainer
module = torch.nn.Linear(2, 1)
optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
for _ in range(3):
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other.step()
    poseidon.log(loss=1.0)
poseidon.log(iteration=7, accuracy=0.5)
for i in range(1026):
    poseidon.log(iteration=i, many=i)
given = {"eval_loss": 2.0, "epoch": 1.0, "eval_runtime": 3.0}
assert CallbackHandler().on_log(None, types.SimpleNamespace(global_step=9), None, given) == given
"""


def test_a_script_of_ddp_logs_without_a_group_and_so_does_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, events = events_of(tmp_path, DDP_LOGGING, monkeypatch, ddp=True)
    assert code == 0, events[-1]
    logged = [(e["iteration"], e["values"]) for e in events if e["event"] == "logged"]
    many = [iteration for iteration, values in logged if "many" in values]
    assert many == [*range(1025), 1025], "of these the last one at the end"
    logged = [(iteration, values) for iteration, values in logged if "many" not in values]
    steps = [(iteration, {"loss": 1.0}) for iteration in (1, 2, 3)]
    assert logged == [*steps, (7, {"accuracy": 0.5}), (9, {"eval_loss": 2.0})]
    *_, progress = (event for event in events if event["event"] == "progress")
    assert progress["iteration"] == 3, "of one worker the optimizer's steps are counted"


@pytest.mark.parametrize("ddp", [False, True])
def test_what_cannot_be_logged_is_an_error_in_the_scripts_line(
    ddp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import poseidon, torch\n\nposeidon.log(loss=torch.ones(2))"
    code, event = run(tmp_path, text, monkeypatch, ddp=ddp)
    assert (code, event["exit_code"]) == (1, 2)
    assert event["message"].startswith("worker 0: script.py, line 3: log() was given loss=")
