"""`poseidon parse_log` and `poseidon plot`: files written, and errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from poseidon.cli.main import main


@pytest.fixture
def log(tmp_path: Path, repository: Path) -> Path:
    path = tmp_path / "train.log"
    shutil.copy(
        repository / "benchmarks" / "results" / "logs" / "cifar10_quick_lr1_4000-5000.log", path
    )
    return path


def test_tables_lie_beside_the_log_or_where_asked(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parse_log", str(log)]) == 0
    assert capsys.readouterr().out == f"Wrote {log}.train\nWrote {log}.test\n"
    assert main(["parse_log", str(log), str(log.parent / "out"), "--delimiter=;", "--verbose"]) == 0
    table = (log.parent / "train.log.test").read_bytes()
    assert table.startswith(b"NumIters,Seconds,LearningRate,accuracy,loss\r\n")
    assert (log.parent / "out" / "train.log.test").read_bytes() == table.replace(b",", b";")
    assert (log.parent / "train.log.train").is_file()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_log_that_windows_has_written(log: Path, encoding: str) -> None:
    assert main(["parse_log", str(log)]) == 0
    table = (log.parent / "train.log.test").read_bytes()
    log.write_bytes(log.read_text().replace("\n", "\r\n").encode(encoding))
    (log.parent / "train.log.test").unlink()
    assert main(["parse_log", str(log)]) == 0
    assert (log.parent / "train.log.test").read_bytes() == table


@pytest.mark.parametrize("name", ["curves.png", "new/curves.svg"])
@pytest.mark.parametrize("flags", [[], ["-x", "seconds"], ["--chart=4"]])
def test_plot(log: Path, name: str, flags: list[str]) -> None:
    twin = log.parent / "second \udce9" / "train.log"
    twin.parent.mkdir()
    shutil.copy(log, twin)
    target = log.parent / name
    assert main(["plot", str(log), str(twin), "-o", str(target), *flags]) == 0
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("word", ["output/quick-1", "quick-1", None])
def test_a_job_stands_for_the_log_of_its_first_worker(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str | None
) -> None:
    """Its id or its folder; the job that was started last needs no word."""
    monkeypatch.setenv("POSEIDON_HOME", str(log.parent / "home"))
    monkeypatch.chdir(log.parent)
    folder = Path("output/quick-1")
    folder.mkdir(parents=True)
    shutil.copy(log, folder / "worker_0.log")
    (folder / "statistics.json").write_text("{}")
    words = [] if word is None else [word]
    assert main(["plot", *words, "-o", "curves.svg"]) == 0
    assert "quick-1: test accuracy" in Path("curves.svg").read_text(encoding="utf-8")
    assert main(["parse_log", word or "quick-1"]) == 0
    assert (folder / "worker_0.log.test").is_file()
    (folder / "worker_0.log").unlink()
    assert main(["plot", *words, "-o", "curves.svg"]) == 1
    assert "quick-1 holds no log of worker 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["parse_log", "absent.log"], 1, "there is no log absent.log, nor a job"),
        (["parse_log", "empty.log"], 1, "empty.log has no line of a net's output"),
        (
            ["parse_log", "train.log", "--delimiter=ab"],
            2,
            "--delimiter is 'ab', expected one character",
        ),
        (
            ["plot", "train.log", "-o", "c.jpg"],
            2,
            "-o c.jpg: expected a name that ends in .png, .svg, .pdf",
        ),
        (["plot", "empty.log", "-o", "c.png"], 1, "empty.log has no line"),
        (["plot", "silent.log", "-o", "c.png", "-chart=0"], 2, "the logs have no accuracy to draw"),
    ],
)
def test_mistakes(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(log.parent)
    Path("empty.log").write_text("hello\n", encoding="utf-8")
    lines = [
        line for line in log.read_text(encoding="utf-8").splitlines() if "Test net" not in line
    ]
    Path("silent.log").write_text("\n".join(lines), encoding="utf-8")
    before = sorted(Path().iterdir())
    assert main(words) == code
    assert message in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
