"""Every module can be the first one that a process imports, without what only tests need.

The first import of a module begins with its package. So the order of imports cannot matter where
modules form no cycle, except between a package and the modules that it imports itself.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*{"hypothesis", "pytest"} & set(sys.modules))
"""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "poseidon" / "caffe2").rglob("*.py"))
    if not path.name.endswith("_pb2.py")
}


def imported(module: str) -> set[str]:
    """Return the modules that a module imports when it is imported, and its packages."""
    names = [module.rpartition(".")[0]]
    for node in at_import(ast.parse(MODULES[module].read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        else:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        while name:
            found.add(name)
            name = name.rpartition(".")[0]
    return found & set(MODULES) - {module}


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of statements that run when their module is imported."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "handlers", "finalbody"):
                yield from at_import(getattr(node, name, []))


def test_modules_of_different_packages_form_no_cycle() -> None:
    graph = {module: imported(module) for module in MODULES}
    owners = {  # a package that imports its own modules stands for all of them
        module: package
        for package, names in graph.items()
        for module in MODULES
        if module.startswith(f"{package}.") and any(n.startswith(f"{package}.") for n in names)
    }
    contracted: dict[str, set[str]] = {}
    for module, names in graph.items():
        owner = owners.get(module, module)
        contracted.setdefault(owner, set()).update(owners.get(name, name) for name in names)
    for owner, names in contracted.items():
        names.discard(owner)
    assert list(TopologicalSorter(contracted).static_order())


@pytest.mark.timeout(600)  # a first import of all compiles them
def test_all_modules_are_imported_without_hypothesis_and_pytest() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "\n"
