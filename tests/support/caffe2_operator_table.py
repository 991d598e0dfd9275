"""The table of Caffe2's operators in docs/caffe2_operators.md.

`python -m tests.support.caffe2_operator_table` writes it anew.
"""

from __future__ import annotations

import csv
import inspect
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from poseidon.caffe2.operators.registry import ANY, Operator, find, registered
from tests.support.needs import SHARED

PAGE = Path(__file__).parents[2] / "docs" / "caffe2_operators.md"
CAFFE2 = SHARED / "caffe2" / "operators.csv"
COLUMNS = 100
TABLE, MISSING = "table of operators", "missing operators"
FOLDERS = {
    "operators": "Control",
    "layers": "Layers and losses",
    "numeric": "Arithmetic, functions, reductions",
    "arrays": "Shapes, joining, gathering, filling",
    "sparse": "Segments, lengths, sparse rows",
    "training": "Updates of parameters and learning rates",
    "system": "Databases, counters, strings, control",
}
FOR_TESTS_OF_CAFFE2 = ("_test.cc", "experiments/", "mkl/", "contrib/")
"""Parts of the names of Caffe2's source files whose operators no net uses."""


def section(name: str, page: str) -> str:
    """Return what the page has between the two marks of a section."""
    return page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def table() -> str:
    """Return a table for each folder of operators: a row for each family, with inputs and
    outputs of its operators.
    """
    families: dict[str, dict[str, list[str]]] = {folder: {} for folder in FOLDERS}
    for name in registered():
        known = find(name)
        module = inspect.getmodule(known.make)
        assert module is not None
        folder = module.__name__.split(".")[-2]
        if "Gradient" not in name or name in ("StopGradient", "ZeroGradient", "NegateGradient"):
            first = " ".join((module.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
            families.setdefault(folder, {}).setdefault(first, []).append(_entry(known))
    lines = []
    for folder, rows in families.items():
        title = FOLDERS.get(folder, folder.capitalize())
        lines += [f"## {title}", "", "| family | operators (inputs → outputs) |", "|---|---|"]
        lines += [f"| {family} | {', '.join(sorted(rows[family]))} |" for family in sorted(rows)]
        lines.append("")
    return "\n".join(lines)


def _entry(known: Operator) -> str:
    return f"`{known.name}` {_count(known.inputs)} → {_count(known.outputs)}"


def _count(limits: tuple[int, int]) -> str:
    least, most = limits
    if most == ANY:
        return f"{least}+" if least else "any"
    return str(least) if least == most else f"{least}-{most}"


def missing() -> list[str]:
    """Return the operators of Caffe2's own list that are not there, but for those that only its
    own tests use.
    """
    with CAFFE2.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    known = set(registered())
    return sorted(
        row["operator"]
        for row in rows
        if row["operator"] not in known
        and row["operator"][0].isupper()
        and not any(part in row["file"] for part in FOR_TESTS_OF_CAFFE2)
    )


def missing_text(names: Iterable[str]) -> str:
    """Return the section of the page for operators that are missing."""
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(listed, COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"


def main() -> int:
    """Write the sections of the page anew; the missing operators only where Caffe2's list is
    there.
    """
    page = PAGE.read_text(encoding="utf-8")
    made = {TABLE: table()}
    if CAFFE2.is_file():
        made[MISSING] = missing_text(missing())
    for name, text in made.items():
        mark = f"<!-- {name} -->\n"
        page = page.replace(mark + section(name, page), mark + text)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
