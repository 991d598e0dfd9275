"""The site's pages in the repository, their shell blocks, and how each block is tested.

A block is run as it stands by `tests/website/test_blocks.py`, unless a comment above it says
otherwise:

    <!-- run by tests/FILE.py -->        another test reads the page and runs it
    <!-- not run: REASON -->             the reason

    python -m website.blocks             # the count, and each block that is not run
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "reference/commands_tested.md"
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "machinefiles/README.md", "ps_server/README.md")
"""Pages of the site that are not in docs/, and folders of such pages."""
FOLDERS = ("examples", "prototxt", "benchmarks/results")
_PROGRAMS = (
    r"\.|awk|cd|cp|docker|export(?= "
    r"\w+=)|find|git|jupyter|kubectl|make|mkdir|mpirun|pip|poseidon(?! "
    r"\w+:)|python3?|redis-server|sbatch|scp|sh"
    r"|srun|ssh(?:-[\w-]+)?|sudo|torchrun|(?:examples|scripts)/[\w/]+\.(?:sh|py)|--[a-z]\w+"
)
COMMAND = re.compile(rf"\s*(?:\$ )?(?:\w+=\S+ )*(?:{_PROGRAMS})(?=\s|$)")
"""The beginning of a line that is a command."""
_SHELL = ("sh", "bash", "console")
_FENCE = re.compile(r"( *)```(\w*)\s*$")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_MARK = re.compile(r"\s*<!-- (not run: .+|run by \S+) -->\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One shell block.

    Attributes:
        page: the page's path in the repository.
        line: the number of its first line.
        text: the commands, without the prompt.
        reason: why it is not run; empty if it is.
        test: the test that runs it; empty for `tests/website/test_blocks.py`.
    """

    page: str
    line: int
    text: str
    reason: str = ""
    test: str = ""


def sources() -> dict[str, str]:
    """Return the path in the repository of each page, by its path on the site; pages in docs/
    have the same name.
    """
    found = {
        str(path.relative_to(ROOT / "docs")): path
        for path in (ROOT / "docs").rglob("*")
        if path.is_file()
    }
    found["index.md"] = ROOT / "README.md"
    outside = [ROOT / name for name in OUTSIDE]
    outside += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    found |= {str(path.relative_to(ROOT)): path for path in outside}
    return {page: str(path.relative_to(ROOT)) for page, path in found.items()}


def shell_pages() -> list[str]:
    """Return the paths in the repository of the pages with shell blocks."""
    return sorted(path for path in sources().values() if path.endswith(".md") and any(blocks(path)))


def blocks(page: str) -> Iterator[Block]:
    """Yield the shell blocks of a page, given by its path in the repository."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for start, end, language in _code(lines):
        text = re.sub(
            r"^\$ ", "", textwrap.dedent("\n".join(lines[start:end])).rstrip(), flags=re.MULTILINE
        )
        if language in _SHELL or (not language and any(map(COMMAND.match, text.splitlines()))):
            mark = _mark(lines, start - 1)
            reason = mark.removeprefix("not run: ") if mark.startswith("not run") else ""
            test = mark.removeprefix("run by ") if mark.startswith("run by") else ""
            yield Block(page=page, line=start + 1, text=text, reason=reason, test=test)


def _code(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the first line, the line after the last, and the language of each fenced or indented
    block.
    """
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        end = number + 1
        if fence:
            while not re.fullmatch(r" *```\s*", lines[end]):
                end += 1
            yield number + 1, end, fence[2]
        elif (
            lines[number].startswith("    ")
            and not (number and lines[number - 1])
            and not _ITEM.match(lines[number])
        ):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            yield number, end, ""
        number = end if not fence else end + 1


def _mark(lines: list[str], number: int) -> str:
    """Return the mark above a block whose fence, or empty line, is `number`."""
    while number >= 0 and (not lines[number].strip() or _FENCE.match(lines[number])):
        number -= 1
    found = _MARK.match(lines[number]) if number >= 0 else None
    return found[1] if found else ""


def report(found: Iterable[Block]) -> str:
    """Return the page with the counts, and the blocks that are not run."""
    every = list(found)
    marked = [block for block in every if block.reason]
    rows = [f"| `{block.page}`, line {block.line} | {block.reason} |" for block in marked]
    pages = Counter(block.page for block in every)
    return "\n".join(
        (
            "# Tested commands\n",
            f"The pages have {len(every)} blocks of shell commands, on {len(pages)} pages. Tests "
            f"run {len(every) - len(marked)}, "
            f"page by page from top to bottom. {len(marked)} are not run:\n",
            "| block | reason |",
            "|---|---|",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    print(report(block for page in shell_pages() for block in blocks(page)))
