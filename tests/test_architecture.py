"""The import rules of docs/internals/architecture.md: which package imports which, no cycles, state
machines without I/O.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # the tests parse all modules

ROOT = Path(__file__).parents[1]

FOLDERS = ("benchmarks", "examples", "poseidon", "ps_server", "scripts", "tests", "website")
"""All folders with Python code."""
MAY_IMPORT: dict[str, set[str]] = {
    "ps_server": set(),
    "poseidon.errors": set(),
    "poseidon.version": set(),
    "poseidon.base": set(),
    "poseidon.binding": set(),
    "poseidon.flags": set(),
    "poseidon.cluster": {"ps_server"},
    "poseidon.exchange": {"ps_server"},
    "poseidon.observe.metrics": {"ps_server"},
    "poseidon.engine": {"ps_server", "poseidon.exchange", "poseidon.observe.metrics"},
    "poseidon.launcher": {
        "ps_server",
        "poseidon.cluster",
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
    },
    "poseidon.torch": {
        "ps_server",
        "poseidon.cluster",
        "poseidon.exchange",
        "poseidon.engine",
        "poseidon.launcher",
    },
    "poseidon.lightning": {"poseidon.engine", "poseidon.torch"},
    "poseidon.ray_train": {"ps_server", "poseidon.exchange", "poseidon.torch"},
    "poseidon.caffe.proto": set(),
    "poseidon.caffe.data": {"poseidon.engine", "poseidon.exchange", "poseidon.caffe.proto"},
    "poseidon.caffe.snapshot": {"poseidon.engine", "poseidon.caffe.proto"},
    "poseidon.caffe.layers": {
        "ps_server",
        "poseidon.exchange",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
    },
    "poseidon.caffe.net": {
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.layers",
    },
    "poseidon.caffe.solver": {
        "ps_server",
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.tools",
    },
    "poseidon.caffe.tools": {
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.solver",
    },
    "poseidon.caffe.export": {
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.tools",
    },
    "poseidon.caffe.launch": {
        "ps_server",
        "poseidon.cluster",
        "poseidon.exchange",
        "poseidon.engine",
        "poseidon.launcher",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.solver",
        "poseidon.caffe.tools",
    },
    "poseidon.pycaffe": {
        "ps_server",
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.solver",
        "poseidon.caffe.tools",
    },
    "poseidon.caffe2": {
        "ps_server",
        "poseidon.engine",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.export",
    },
    "poseidon.observe.plan": {
        "ps_server",
        "poseidon.cluster",
        "poseidon.exchange",
        "poseidon.engine",
        "poseidon.launcher",
        "poseidon.torch",
        "poseidon.caffe.proto",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.tools",
    },
    "poseidon.observe.dashboard": {
        "poseidon.cluster",
        "poseidon.observe.metrics",
        "poseidon.launcher",
    },
    "poseidon.cli": {
        "ps_server",
        "poseidon.cluster",
        "poseidon.exchange",
        "poseidon.observe.metrics",
        "poseidon.engine",
        "poseidon.launcher",
        "poseidon.torch",
        "poseidon.caffe.proto",
        "poseidon.caffe.data",
        "poseidon.caffe.snapshot",
        "poseidon.caffe.layers",
        "poseidon.caffe.net",
        "poseidon.caffe.tools",
        "poseidon.caffe.export",
        "poseidon.caffe.launch",
        "poseidon.pycaffe",
        "poseidon.caffe2",
        "poseidon.observe.plan",
        "poseidon.observe.dashboard",
    },
}
"""The packages that each package imports, besides itself and `SHARED`: no others, and each of these
somewhere.
"""

FRONT_ENDS = {
    "poseidon.caffe": "caffe",
    "poseidon.pycaffe": "caffe",
    "poseidon.caffe2": "caffe2",
    "poseidon.torch": "torch",
    "poseidon.lightning": "torch",
    "poseidon.ray_train": "torch",
}
"""The front end that a package is of."""

OUTSIDE = {
    "poseidon",
    "poseidon.__main__",
    "poseidon.caffe",
    "poseidon.observe",
    "poseidon.startup.sitecustomize",
}
"""Modules of no package of the list."""

SHARED = {
    "poseidon.base",
    "poseidon.binding",
    "poseidon.errors",
    "poseidon.flags",
    "poseidon.version",
}
"""What every package of `poseidon` may import. `ps_server` imports nothing of `poseidon`."""


def package_of(module: str) -> str:
    """Return the package of the list that a dotted module name belongs to."""
    parts = module.split(".")
    if parts[0] == "ps_server":
        return parts[0]
    inner = ".".join(parts[:3])
    return inner if inner in MAY_IMPORT else ".".join(parts[:2])


def modules(*folders: str) -> Iterator[tuple[str, Path]]:
    for folder in folders or ("poseidon", "ps_server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path


@dataclass(frozen=True, slots=True)
class Facts:
    """What the tests ask about a module.

    Attributes:
        imports: its import statements.
        unsafe: see `unsafe`.
        too_new: see `too_new`.
        arguments: see `arguments_of_python`.
    """

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    unsafe: frozenset[str]
    too_new: frozenset[str]
    arguments: frozenset[str]


@cache
def facts(path: Path) -> Facts:
    """Parse a module, once for all tests."""
    code = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return Facts(
        imports=tuple(node for node in code if isinstance(node, ast.Import | ast.ImportFrom)),
        unsafe=frozenset(unsafe(code)),
        too_new=frozenset(too_new(code)),
        arguments=frozenset(arguments_of_python(code)),
    )


def imports(module: str, path: Path) -> Iterator[str]:
    """Dotted names of this project's modules that `path` imports, relative imports resolved."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in facts(path).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in FOLDERS)


def module_of(name: str, known: set[str]) -> str:
    """The module that an imported name is, or is defined in: `ps_server.errors.WireError` ->
    `ps_server.errors`.
    """
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def test_each_package_imports_exactly_what_the_list_says() -> None:
    found: dict[str, set[str]] = {package: set() for package in MAY_IMPORT}
    every = dict(modules())
    for module, path in every.items():
        package = package_of(module)
        if module in OUTSIDE:
            continue
        assert package in found, f"{module} is in no package of the list"
        for name in imports(module, path):
            if package_of(name) not in {package, *(SHARED if package != "ps_server" else ())}:
                found[package].add(package_of(name))
    assert found == MAY_IMPORT


def test_front_ends_import_no_siblings_and_what_is_below_imports_no_front_end() -> None:
    """The picture of docs/internals/architecture.md."""

    def front_end(package: str) -> str:
        return FRONT_ENDS.get(".".join(package.split(".")[:2]), "")

    for package, imported in MAY_IMPORT.items():
        above = {front_end(name) for name in imported} - {"", front_end(package)}
        if package == "poseidon.caffe2":
            assert above == {"caffe"}  # databases, images and definitions of Caffe
        elif package not in ("poseidon.cli", "poseidon.observe.plan"):  # these know all
            assert not above, f"{package} imports {above}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    every = dict(modules(*FOLDERS))
    known = set(every)
    graph = {
        module: {module_of(name, known) for name in imports(module, path)} - {module, ""}
        for module, path in every.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_packages_import_nothing_of_the_other_folders() -> None:
    others = set(FOLDERS) - {"poseidon", "ps_server"}
    for module, path in modules():
        assert not [name for name in imports(module, path) if name.split(".")[0] in others], module


def test_the_protocol_does_no_io() -> None:
    """The state machines of the server never see a socket, a thread or the time of day."""
    forbidden = {"zmq", "socket", "threading", "time", "asyncio", "ps_server.transport", "queue"}
    pure = [*(ROOT / "ps_server" / "protocol").glob("*.py"), ROOT / "ps_server" / "rules.py"]
    assert len(pure) > 10
    for path in pure:
        for node in facts(path).imports:
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            else:
                found = {node.module or ""}
            assert not found & forbidden, f"{path.relative_to(ROOT)} imports {found & forbidden}"


UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "code", "runpy"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "pickle.load",
    "pickle.loads",
}
SAFE_HERE = {
    # the caller's own function, for the caller's own workers
    "poseidon.torch.function": {"pickle", "cloudpickle"},
    # an unpickler that knows arrays and nothing else
    "poseidon.caffe.data.prepare.cifar10_source": {"pickle"},
    "poseidon.torch.script_process": {"exec", "runpy"},  # the user's own script
}


def dotted(node: ast.expr) -> str:
    """The dotted name that an expression is; empty for any other."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(code: Iterable[ast.AST]) -> Iterator[str]:
    """What a module has that can turn data into code: imports, calls, and commands given to a
    shell.
    """
    for node in code:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            safe = any(
                w.arg == "weights_only" and ast.unparse(w.value) == "True" for w in node.keywords
            )
            called = dotted(node.func)
            if called in UNSAFE_CALLS and not safe:
                yield called
            yield from (
                word.arg
                for word in node.keywords
                if word.arg in ("shell", "allow_pickle") and ast.unparse(word.value) != "False"
            )


def test_nothing_turns_data_into_code() -> None:
    """What comes from the network or a file reaches no pickle, no eval and no shell."""
    assert list(unsafe(ast.walk(ast.parse("import pickle\nexec(x)\nrun(y, shell=True)")))) == [
        "pickle",
        "exec",
        "shell",
    ]
    loads = "torch.load(f)\ntorch.load(f, weights_only=False)\ntorch.load(f, weights_only=True)"
    assert list(unsafe(ast.walk(ast.parse(loads)))) == ["torch.load"] * 2
    for module, path in modules():
        found = facts(path).unsafe
        assert found == SAFE_HERE.get(module, set()), f"{module}: {found}"


def arguments_of_python(code: Iterable[ast.AST]) -> Iterator[str]:
    """`-m` and `-c` among the words of a list or a call; `sh -c` is another one."""
    for node in code:
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            parts = [*getattr(node, "elts", ()), *getattr(node, "args", ())]
            words = {part.value for part in parts if isinstance(part, ast.Constant)}
            yield from words & ({"-m"} if "sh" in words else {"-m", "-c"})


def test_one_module_makes_the_arguments_of_python() -> None:
    makes = "poseidon.cluster.python_command"
    found = {module: facts(path).arguments for module, path in modules()}
    assert {module for module, words in found.items() if "-c" in words} == {makes}
    public = {"poseidon", "ps_server"}  # they name the command to type
    assert {module for module, words in found.items() if "-m" in words} <= public


NEED_A_NAMED_USER = re.compile(
    r"\.expanduser\(|\bPath\.home\(|\bgetuser\(|\bgetlogin\(|\bpwd\.getpw|\.owner\(\)"
)
"""Calls that raise an error, or return `~`, where a user id has no name."""


def test_home_folders_and_names_of_users_come_from_settings() -> None:
    """`poseidon.base.settings` has `expanded` and `name_user`, which a user id without a name passes."""
    assert NEED_A_NAMED_USER.findall("Path(a).expanduser()\ngetpass.getuser()") != []
    for module, path in modules("poseidon", "ps_server", "scripts", "examples"):
        if module != "poseidon.base.settings":
            found = NEED_A_NAMED_USER.findall(path.read_text(encoding="utf-8"))
            assert not found, f"{module}: {found}"


NEWER_THAN_3_10 = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout"},
    "builtins": {"BaseExceptionGroup", "ExceptionGroup"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "tomllib": {"load", "loads"},
    "typing": {
        *("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack"),
        *("assert_never", "assert_type", "dataclass_transform", "override", "reveal_type"),
    },
}
"""What Python's library has only since 3.11 or later.

Newer syntax is ruff's matter (`target-version`).
"""


def too_new(code: Iterable[ast.AST]) -> Iterator[str]:
    """The names of `NEWER_THAN_3_10` that a module uses."""
    for node in code:
        if isinstance(node, ast.ImportFrom) and node.module in NEWER_THAN_3_10:
            names = {alias.name for alias in node.names} & NEWER_THAN_3_10[node.module]
            yield from (f"{node.module}.{name}" for name in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NEWER_THAN_3_10.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in NEWER_THAN_3_10["builtins"]:
            yield node.id


def test_python_3_10_has_all_that_is_used() -> None:
    example = ast.parse(
        "import math\nfrom enum import StrEnum\nmath.cbrt(1)\nraise ExceptionGroup('', [])"
    )
    assert set(too_new(ast.walk(example))) == {"enum.StrEnum", "math.cbrt", "ExceptionGroup"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = facts(path).too_new
            assert not found, (
                f"{path.relative_to(ROOT)} uses {', '.join(sorted(found))}, which Python 3.10 lacks"
            )


def test_tests_mirror_the_source() -> None:
    """`test_NAME.py` or `test_NAME_ASPECT.py`, NAME a module or a package in the same folder."""
    for path in sorted((ROOT / "tests").glob("p*/**/test_*.py")):
        folder, name = ROOT / path.parent.relative_to(ROOT / "tests"), path.stem[5:]
        names = {each.stem.strip("_") for each in folder.glob("*") if each.suffix in (".py", "")}
        assert any(f"{name}_".startswith(f"{each}_") for each in names if each), (
            f"{path.relative_to(ROOT)}: {folder.relative_to(ROOT)} has no module of this name"
        )
