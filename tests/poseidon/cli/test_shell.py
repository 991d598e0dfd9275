"""`poseidon completion`: what bash offers, and that other shells take the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.binding import STARTUP
from poseidon.cli.main import main
from poseidon.cli.parsers.jobs import SHELLS
from poseidon.cli.shell import script, unbinding_option


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("poseidon tr", "train"),
        ("poseidon train --exch", "--exchange_plan --exchange"),
        ("poseidon train --exchange h", "hybrid"),
        ("poseidon train --launcher s", "ssh"),
        ("poseidon completion z", "zsh"),
        ("poseidon train --staleness x", ""),
        ("poseidon train --client_i", ""),
    ],
)
def test_bash(words: str, offered: str) -> None:
    program = f'{script("bash")}\nCOMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; _shtab_poseidon; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.needs("zsh")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-n"], input=script("zsh"), text=True, check=True, timeout=60)


def test_zsh_has_flags_with_their_help() -> None:
    said = script("zsh")
    assert "--solver[the solver definition (prototxt)]:FILE:_files" in said
    assert "(auto hybrid ps svb allreduce local)" in said


def test_each_shell_has_a_script() -> None:
    assert all("poseidon" in script(shell) for shell in SHELLS)


ROOT = Path(__file__).parents[3]
SCRIPT = """
import importlib.util
import multiprocessing
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "caffe-fast-rcnn", "python"))


def origin(name):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "caffe-fast-rcnn", "python"))
    return importlib.util.find_spec(name).origin


if __name__ == "__main__":
    print(sys.argv)
    print(origin("caffe"))
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.apply(origin, ("caffe2.python",)))
    code = "import importlib.util; print(importlib.util.find_spec('caffe2.proto').origin)"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", code], check=True)
    sys.exit(7)
"""


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.py", "--solver=a", "-h", "--help", "--", "-x", "-v", "--log_dir=b"],
        ["-m", "my_package.evaluate", "--gpu", "0"],
        ["-W", "error", "-c", "pass", "-I"],
        ["-V"],
    ],
)
def test_all_words_are_pythons(
    words: list[str], unbound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def execv(program: str, argv: list[str]) -> None:
        started.append((program, argv, os.environ["PYTHONPATH"].split(os.pathsep)[0]))
        raise SystemExit(5)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit, match="5"):
        main(["python", *words])
    assert started == [(sys.executable, [sys.executable, *words], str(STARTUP))]


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_its_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["python", word])
    assert capsys.readouterr().out.startswith("usage: poseidon python")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["-I", "a.py"], "-I"),
        (["-E"], "-E"),
        (["-uBS", "a.py"], "-S"),
        (["-X", "dev", "-W", "error", "-E", "a.py"], "-E"),
        (["-Xdev", "-Werror", "-I"], "-I"),
        (["--check-hash-based-pycs", "never", "-E", "a.py"], "-E"),
        (["-u", "-Wd", "a.py", "-I"], None),
        (["-X", "-E", "a.py"], None),
        (["-m", "a", "-E"], None),
        (["-cprint('E')", "-E"], None),
        (["-um", "a", "-E"], None),
        (["-", "-E"], None),
        (["--", "a.py", "-E"], None),
        ([], None),
    ],
)
def test_options_that_keep_the_names_from_being_bound(
    words: list[str], option: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unbinding_option(words) == option
    if option:
        assert main(["python", *words]) == 2
        assert capsys.readouterr().err == (
            f"poseidon python: Python's option {option} also keeps `caffe` and `caffe2` from "
            "being bound; "
            "leave it out\n"
        )


def test_a_script_and_what_it_starts(tmp_path: Path) -> None:
    """With a Caffe of its own in the folder that it inserts into its path, as py-faster-rcnn
    has.
    """
    own = tmp_path / "caffe-fast-rcnn" / "python" / "caffe"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "poseidon", "python", "script.py", "--gpu", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == [
        "['script.py', '--gpu', '0']",
        str(ROOT / "poseidon/pycaffe/__init__.py"),
        *[str(ROOT / "poseidon/caffe2/__init__.py")] * 3,
        str(ROOT / "poseidon/caffe2/proto/__init__.py"),
    ]


def test_a_traceback_is_that_of_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def f():\n    return 1 / 0\n\n\nf()\n")
    (tmp_path / "wrong.py").write_text("print 'Python 2'\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("script.py", "wrong.py"):
        python, bound = (
            subprocess.run(
                [sys.executable, *words, name],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
            for words in ([], ["-m", "poseidon", "python"])
        )
        assert (bound.returncode, bound.stdout, bound.stderr) == (1, python.stdout, python.stderr)
        assert "Error" in bound.stderr
