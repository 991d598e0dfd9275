"""Errors become one sentence and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from poseidon.cli import jobs, running_jobs
from poseidon.cli.main import COMMANDS, OTHER_NAMES, main


class FullDisk(io.StringIO):
    """Standard output on a disk that is full: noticed only when the buffer is emptied."""

    def flush(self) -> None:
        """Refuse."""
        raise OSError(errno.ENOSPC, "No space left on device")


def test_output_on_a_full_disk_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    for words in (["ps"], ["--help"], ["--version"], ["ps", "--help"]):
        monkeypatch.setattr("sys.stdout", FullDisk())
        assert main(words) == 1
        name = "poseidon ps" if words == ["ps"] else "poseidon"
        assert capsys.readouterr().err == f"{name}: No space left on device\n"
    monkeypatch.setattr("sys.stderr", FullDisk())
    monkeypatch.setattr(running_jobs, "run_ps", lambda _: 0)
    assert main(["ps"]) == 0
    sys.stderr.flush()  # what the interpreter does at its end, and exits with 120 if it fails


def test_a_package_that_is_not_installed_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pip install --no-deps`, or another Python than the one with torch."""

    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'torch.nn'", name=missing)

    monkeypatch.setattr("poseidon.cli.main.import_module", fail)
    missing = "torch.nn"
    assert main(["draw_net", __file__, "net.png"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("poseidon draw_net: Python finds no package 'torch'")
    assert message.count("\n") == 1
    missing = "poseidon.cli.absent"
    with pytest.raises(ModuleNotFoundError):
        main(["draw_net", __file__, "net.png"])


def test_a_file_that_nobody_foresaw_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/secret")

    monkeypatch.setattr(running_jobs, "run_ps", fail)
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == "poseidon ps: /etc/secret: Permission denied\n"


@pytest.mark.parametrize("kind", [KeyError, OSError, FileNotFoundError])
def test_what_fails_in_a_module_of_import_is_named_with_its_line(
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = tmp_path / "layer_that_fails.py"
    module.write_text(f"def run(parsed):\n    raise {kind.__name__}('gone')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(jobs, "run_train", lambda parsed: import_module(module.stem).run(parsed))
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    assert main(["train", "--solver=/dev/null", f"--import={module.stem}"]) == 1
    said = capsys.readouterr().err
    assert said == f"poseidon train: {module}:2: {kind.__name__}: {kind('gone')}\n"


def test_memory_that_runs_out_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error: Exception = MemoryError("Unable to allocate 7.45 GiB for an array")

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(running_jobs, "run_ps", fail)
    assert main(["ps"]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("poseidon ps: out of memory: 7.45 GiB more do not fit; ")
        and said.count("\n") == 1
    )
    error = RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        main(["ps"])


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_a_file_does_not_get_the_descriptor_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from poseidon.cli import main, running_jobs\n"
        "def run(_): print('said', file=sys.stderr); return os.open(os.devnull, os.O_RDONLY)\n"
        "running_jobs.run_ps = run; raise SystemExit(main.main(['ps']))"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=tmp_path, check=False
    )
    assert done.returncode > 2


def test_ends_of_children_are_followed_though_the_parent_ignored_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: list[object] = []
    monkeypatch.setattr(
        running_jobs, "run_ps", lambda _: handlers.append(signal.getsignal(signal.SIGCHLD)) or 0
    )
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert main(["ps"]) == 0
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert handlers == [signal.SIG_DFL]


def test_a_current_folder_that_has_been_removed_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["ps"]) == 1
    said = capsys.readouterr().err
    assert said == "poseidon ps: the current folder has been removed; change to one that exists\n"


def test_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdout", None)
    assert main(["ps"]) == 0


def test_standard_output_takes_names_that_are_not_utf_8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "net.prototxt").write_text('name: "x"')
    content = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(content, encoding="utf-8", errors="strict"))
    assert (
        main(["upgrade_net_proto_text", f"{tmp_path}/net.prototxt", f"{tmp_path}/caf\udce9"]) == 0
    )
    assert content.getvalue().decode().endswith(f"Wrote a net in text to {tmp_path}/caf\\udce9.\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != "net.prototxt"] == [
        "caf\udce9"
    ]


@pytest.mark.parametrize(
    "words", [["train", "--solver=café"], ["test", "--model=net", "--weights=café"]]
)
def test_names_are_themselves_in_a_locale_that_knows_ascii_alone(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "net").touch()
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "poseidon", *words],
        cwd=tmp_path,
        env={**os.environ, **locale, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "café" in done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ps --hostfil=x", "unknown flag --hostfil; did you mean --hostfile?"),
        ("ps --nosuch", "unknown flag --nosuch;"),
        ("run --epochs=3 train.py", "unknown flag --epochs; the script's own flags come after"),
        ("run -m", "SCRIPT is missing"),
        ("ps more words", "did not expect 'more words'"),
        ("train solver.prototxt", "did you mean --solver=solver.prototxt?"),
        ("train -model net", "--model: the solver names the net; give --solver=FILE"),
        ("train --stalenes=1", "unknown flag --stalenes; did you mean --staleness?"),
        ("plot a.log -o a.png -chart 9", "--chart: expected one of 0, 1, 2, 3, 4, 5, 6, 7, found"),
        ("ps --hostfile", "--hostfile: expected a value"),
        ("train --solver=", "--solver: the value is empty"),
        ("train", "--solver is missing"),
        ("draw_net", "INPUT_NET and OUTPUT_FILE are missing"),
        ("train --solver=s --staleness=-1", "--staleness: expected a whole number, 0 or more"),
        ("train --solver=s --consistency=BSP", "which is --consistency=SSPPush --staleness=0"),
        ("train --solver=s --exchange=hybird", "found 'hybird'; did you mean hybrid?"),
        ("train --solver=s --background=maybe", "expected true or false, found 'maybe'"),
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        ("extract", "did you mean 'extract_features'?"),
        ("xyz", "unknown command 'xyz';"),
        ("prepare_mnist", "did you mean 'convert_mnist'?"),
        ("./examples/cifar10/create_cifar10.sh", "did you mean 'prepare_cifar10'?"),
        ("plot_training_log.py 6 a.png a.log", "did you mean 'plot'?"),
        ("build/tools/caffe train --solver=s", "leave it out: poseidon train --solver=s"),
        ("caffe", "unknown command 'caffe'; did you mean 'train'?"),
        ("python/classify.py a.jpg a.npy", "poseidon python python/classify.py runs Caffe's"),
        ("train --solver=s --base_lr=0.1", "did you mean --set base_lr=0.1?"),
        ("train --solver=s -lr 0.1", "unknown flag -lr; did you mean --set base_lr=VALUE?"),
        ("train --solver=s --iterations=50", "did you mean --set max_iter=50?"),
        ("-x ps", "unexpected -x; flags follow the command: poseidon ps -x"),
    ],
)
def test_wrong_words_are_one_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    said = capsys.readouterr().err
    command = words.split()[0]
    name = f"poseidon {command}" if command in COMMANDS else "poseidon"
    assert re.fullmatch(rf"{name}: .*(; see|\? See) {name} --help\n", said)
    assert says in said


def test_names_of_other_tools_lead_to_commands() -> None:
    assert set(OTHER_NAMES.values()) <= {*COMMANDS, "classify"}


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poseidon.cli.main.import_module", interrupted)
    assert main(["ps"]) == 130
    assert capsys.readouterr().err == "poseidon ps: interrupted\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-help"], ["-h"], ["help"]])
def test_help_without_a_command_lists_the_first_and_then_the_tools(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    output = capsys.readouterr().out
    assert 12 <= sum(f"\n  {name} " in output for name in COMMANDS) <= 15
    with pytest.raises(SystemExit, match="0"):
        main(["help", "tools"])
    output += capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in COMMANDS)
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_line_for_each_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", name, "all"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: poseidon {name} ")
    assert max(map(len, lines[1:])) <= 80
    assert any(line.startswith(f"  poseidon {name} ") for line in lines), "an example"
    for flag in COMMANDS[name].parser().flags():
        left = f"  {flag.name}=" if flag.of else f"  {flag.title}"
        if flag.text:
            assert any(line.replace("[no]", "").startswith(left) for line in lines), left


@pytest.mark.parametrize("name", ["train", "run"])
def test_help_of_a_job_shows_what_people_need_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for topic, shown in (("", "--local_steps=H"), ("rounds", "outer_lr="), ("ray", "clients=")):
        with pytest.raises(SystemExit, match="0"):
            main([name, f"--help={topic}" if topic else "--help"])
        output = capsys.readouterr().out
        assert f"  {shown}" in output
        assert sum(line.startswith("  ") for line in output.splitlines()) <= 30
    with pytest.raises(SystemExit, match="2"):
        main([name, "--help=round"])
    assert "did you mean rounds?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--version"], [], ["train", "--help"], ["completion", "bash"], ["trian"]]
)
def test_what_is_answered_at_once_imports_no_torch(words: list[str]) -> None:
    program = (
        "import sys\nfrom poseidon.cli.main import COMMANDS, main\ntry:\n    "
        "main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'google.protobuf', 'paramiko', 'matplotlib', 'psutil'} & "
        "set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_commands_that_start_nothing_import_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes two seconds, and `poseidon ps` a fifth of one."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    program = (
        "import sys\nfrom poseidon.cli.main import main\n"
        "print([main([name, 'absent'][:count]) for name, count in (('ps', 1), ('kill', 2), "
        "('logs', 2), ('stats', 2))])\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 1, 1, 1]"


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch\x1b[2J"],
        ["train", "--solver=a\x1b[2Jb\x9b\u202e"],
        ["train", "--nosuch\x1b[2J=1"],
        ["logs", "a\x1b]0;title\x07"],
        ["upgrade_net_proto_text", "a\x1b[2J", "b"],
        ["plot", "-o", "x.png", "a\x1b[2J"],
    ],
)
def test_arguments_and_names_do_not_reach_the_terminal_as_they_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main(words)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "\\x1b" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_a_name_in_an_error_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--solver=a\nI0101 forged"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_lines_of_a_log_show_their_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    (tmp_path / "worker_0.log").write_text("I0101 a\x1b[2Jb\n")
    assert main(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "I0101 a\\x1b[2Jb\n"
