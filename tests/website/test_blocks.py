"""Every shell block of the site's pages is run, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.page_runner import BEFORE, CONTINUED, REPLACED, TRAINED_BY_PAGE, run_page
from website.blocks import COMMAND, ROOT, Block, blocks, report, shell_pages

PAGES = shell_pages()
RUN = [page for page in PAGES if any(not block.reason and not block.test for block in blocks(page))]
QUICK = {"CONTRIBUTING.md", "docs/installation.md", "ps_server/README.md"}
"""Pages of every run of the tests; the others start many processes."""


@pytest.mark.processes
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in QUICK else pytest.mark.thorough) for page in RUN],
)
def test_the_commands_of_a_page_run_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    assert run_page(page, tmp_path)


def every() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def test_the_page_counts_them() -> None:
    found = every()
    marked = [block for block in found if block.reason]
    assert len(found) > 100
    counts = re.search(
        r"have (\d+) blocks of shell commands, on (\d+) pages. Tests run (\d+),.* (\d+) are not run",
        report(found),
    )
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [
        len(found),
        len(PAGES),
        len(found) - len(marked),
        len(marked),
    ]


def test_a_mark_names_what_is_there() -> None:
    for block in every():
        for path in re.findall(r"(?<![\w/])tests/[\w/.]+", f"{block.reason} {block.test}"):
            assert (ROOT / path.rstrip(".")).exists(), f"{block.page}:{block.line}: {path}"
        if block.test:
            text = (ROOT / block.test).read_text(encoding="utf-8")
            assert Path(block.page).name in text, (
                f"{block.page}:{block.line}: {block.test} does not read the page"
            )


def test_each_line_of_a_shell_block_is_a_command() -> None:
    """A text formatter that joins or cuts lines leaves words where a command is expected."""
    first = re.compile(rf"{COMMAND.pattern}|(?:\w+=\S+ )*(?:pkill|scripts/(?:check|test))\s")
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in re.sub(r"\\\n", "", block).splitlines():
                assert not line or line.startswith("#") or first.match(line), f"{page}: {line}"


def test_preparations_are_for_pages_that_run() -> None:
    assert {*BEFORE, *CONTINUED, *REPLACED, *TRAINED_BY_PAGE, *QUICK} <= set(RUN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```sh\nls\n```\n", [(2, "ls", "", "")]),
        ("```\nposeidon train --solver=S\n```\n", [(2, "poseidon train --solver=S", "", "")]),
        ("```\nposeidon train: 3 problems\n```\n", []),
        ("```text\nposeidon train\n```\n", []),
        ("```console\n$ make\n```\n", [(2, "make", "", "")]),
        ("a\n\n    cd x\n\n    make\n\nb\n", [(3, "cd x\n\nmake", "", "")]),
        ("- a\n    - python b\n", []),
        ("<!-- not run: it is slow -->\n\n    make\n", [(3, "make", "it is slow", "")]),
        (
            "<!-- run by tests/test_a.py -->\n```sh\nmake\n```\n",
            [(3, "make", "", "tests/test_a.py")],
        ),
        (
            "<!-- not run: it is slow -->\n\n```sh\nmake\n```\n\n```sh\nls\n```\n",
            [(4, "make", "it is slow", ""), (8, "ls", "", "")],
        ),
        ("```\nA=1 B=2 python x.py\n```\n", [(2, "A=1 B=2 python x.py", "", "")]),
        ("```\nexport   trained nets\n```\n", []),
    ],
)
def test_blocks_are_found(
    text: str,
    found: list[tuple[int, str, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr("website.blocks.ROOT", tmp_path)
    assert [
        (block.line, block.text, block.reason, block.test) for block in blocks("page.md")
    ] == found
