"""Flags in gflags' spellings, and flags without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cli.main import main, parse_arguments


@pytest.mark.parametrize(
    ("words", "svb", "wait_free", "background"),
    [
        ("--solver=s", None, True, False),
        ("-solver s -svb -background", True, True, True),
        ("--svb --solver s --background=true", True, True, True),
        ("--solver=s --nosvb --nowait_free", False, False, False),
        ("--solver=s --svb=False -wait-free=0 --background=false", False, False, False),
    ],
)
def test_switches(words: str, svb: bool | None, wait_free: bool, background: bool) -> None:
    flags = parse_arguments(["train", *words.split()])
    assert (flags.solver, flags.svb, flags.wait_free, flags.background) == (
        Path("s"),
        svb,
        wait_free,
        background,
    )


def test_a_switch_leaves_the_script_and_its_words_alone() -> None:
    words = ["run", "--gpu", "[0, 1]", "--svb", "script.py", "--svb", "-trace", "0"]
    flags = parse_arguments(words)
    assert (flags.gpu, flags.svb, flags.trace) == ("0,1", True, False)
    assert (flags.script, flags.arguments) == (Path("script.py"), ("--svb", "-trace", "0"))
    assert flags.argv == words


def test_caffes_logging_flags_are_taken_by_every_command() -> None:
    assert parse_arguments(["ps", "--logtostderr", "-alsologtostderr=1"]).notes == []
    assert parse_arguments(["train", "--solver=s", "-log_dir=x", "--v", "1"]).notes == [
        "--log_dir has no effect here: logs are in the job's folder, --output",
        "--v has no effect here",
    ]


def test_flags_of_the_original_name_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        "--solver=/nowhere",
        "--num_table_threads=2",
        "--init_thread_access_table",
        "--row_type",
        "0",
    ]
    assert main(words) == 1
    assert capsys.readouterr().err.splitlines()[:3] == [
        "note: --num_table_threads has no effect here: --workers is the number of workers "
        "of a client on CPU, "
        "--gpu names its GPUs",
        "note: --row_type has no effect here",
        "note: --init_thread_access_table has no effect here",
    ]


def test_clients_other_than_the_first_have_nothing_to_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--solver=/nowhere", "--client_id=1"]) == 0
    assert (
        capsys.readouterr().err == "client 1 is started by the command of client 0; nothing to do\n"
    )
