"""The examples of docs/own_layers.md, from a class to a trained net, and mistakes on the way."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from poseidon.caffe.layers import registry
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.cli.main import main
from poseidon.engine.this_process import ENDED
from poseidon.launcher.site import Site
from tests.support.shadowing_files import write_shadowing_files
from tests.support.training_processes import machinefile, poseidon, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

FILE = re.compile(r"^Save as `([^`]+)`:\n\n```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^poseidon (train .*)$", re.MULTILINE)
LOSS = re.compile(r"Train net output #0: loss = (\S+)")


@pytest.fixture
def page(repository: Path, tmp_path: Path) -> str:
    """The page's text; its files are in `tmp_path`."""
    text = (repository / "docs" / "own_layers.md").read_text(encoding="utf-8")
    files = dict(FILE.findall(text))
    assert sorted(files) == ["net.prototxt", "softplus.py", "solver.prototxt"]
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    write_shadowing_files(tmp_path, packages=False)
    return text


@pytest.mark.parametrize("clients", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_page_trains(page: str, tmp_path: Path, clients: int) -> None:
    (words,) = COMMAND.findall(page)
    here = tmp_path.rename(f"{tmp_path}\udce9")  # the name of a folder need not be UTF-8
    done = poseidon(here, *words.split(), f"--hostfile={machinefile(here, clients)}")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in LOSS.findall(done.stderr)]
    assert len(losses) == 5 and losses[-1] < 0.05 * losses[0]
    (gain,) = dict(read_model(here / "soft_iter_200.caffemodel"))["soft"]
    assert gain.shape == (8,) and (gain != 1).all()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the test import modules in this process, which forgets them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    for name in ("broken", "softplus"):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("page", "here")
def test_time_takes_the_module_too(tmp_path: Path) -> None:
    words = ("-model=net.prototxt", "-iterations=1", "-import", "softplus")
    done = poseidon_here(tmp_path, "time", *words)
    assert done.returncode == 0 and "soft" in done.stderr


@pytest.mark.usefixtures("page", "here")
def test_a_forward_pass_that_fails_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "softplus.py"
    before, line, after = source.read_text(encoding="utf-8").partition(
        "        gain = self.gain.view"
    )
    source.write_text(f"{before}{line}(1, 2, 3)  #{after}", encoding="utf-8")
    done = poseidon_here(tmp_path, "train", "--solver=solver.prototxt", "--import=softplus")
    assert done.returncode == 1
    where = f"worker 0: {source}:{before.count(chr(10)) + 1}: RuntimeError: "
    assert f"poseidon train: {where}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("page")
def test_a_breakpoint_in_a_layer_reads_what_the_launcher_reads(tmp_path: Path) -> None:
    source = tmp_path / "softplus.py"
    line = "        gain = self.gain.view"
    text = source.read_text(encoding="utf-8")
    assert text.count(line) == 1
    source.write_text(text.replace(line, f"        breakpoint()\n{line}"), encoding="utf-8")
    words = ("train", "--solver=solver.prototxt", "--import=softplus")
    done = poseidon(tmp_path, *words, typed="p type(self).__name__\nq\n")
    assert "(Pdb) 'SoftPlus'\n(Pdb) " in done.stderr
    assert done.returncode == 1
    where = f"worker 0: {source}:{text[: text.index(line)].count(chr(10)) + 2}"
    assert done.stderr.splitlines()[-1] == f"poseidon train: {where}: {ENDED}"


@pytest.mark.usefixtures("page", "here")
@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("", "", "net.prototxt:7: layer 'soft' (SoftPlus): unknown layer type 'SoftPlus'"),
        ("nowhere", "", "--import nowhere: there is no module 'nowhere' in"),
        ("broken", "x = 1\ny = undefined\n", "broken.py:2: NameError"),
        ("broken", "def x(:\n", r"broken.py:1: invalid syntax"),
        (
            "broken",
            "from poseidon.caffe.layers.base import Layer\nfrom poseidon.caffe.layers.registry import "
            "register\n\n"
            "@register('ReLU')\nclass Mine(Layer): pass\n",
            "broken.py:4: ValueError: layer type 'ReLU' is already registered by ReLU",
        ),
    ],
)
def test_one_sentence_for_each_mistake(
    tmp_path: Path,
    module: str,
    code: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher imports the module too: no process is started."""
    (tmp_path / "broken.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Site, "start", lambda *_: pytest.fail("a process was started"))
    assert main(["train", "--solver=solver.prototxt", f"--import={module}"]) in (1, 2)
    assert message in capsys.readouterr().err
