"""The documentation names what is there: paths, modules, commands, flags and links; its prose
keeps to 100 columns.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import msgpack
import pytest

from poseidon.caffe2.training import flags as trainer_flags
from poseidon.cli.main import COMMANDS
from poseidon.cluster import events
from poseidon.cluster.agent import messages
from poseidon.cluster.process import ProcessSpec
from poseidon.exchange import worker_links
from ps_server.codecs.base import SEGMENT_ELEMENTS
from ps_server.protocol import fields, frames, placement, settings
from ps_server.protocol.collections_and_signals import MAX_OPEN_GATHERS
from ps_server.protocol.members import LEGAL, MAX_ANSWERED_FAULTS
from ps_server.protocol.row_cell import MAX_WAITING
from ps_server.protocol.row_settings import MAX_ROW_ELEMENTS, MAX_ROW_TABLES
from ps_server.server import MAX_FIRST_BYTES
from ps_server.transport.zmq_sockets import MAX_FRAME_BYTES
from tests.ps_server.protocol.test_frames import MESSAGES
from tests.test_architecture import MAY_IMPORT

ROOT = Path(__file__).parents[1]
MOST_COLUMNS = 100
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "benchmarks/results/*.md",
        "examples/**/README.md",
        "machinefiles/README.md",
        "prototxt/**/README.md",
        "ps_server/README.md",
    )
    for path in ROOT.glob(pattern)
)
SOURCES = ("poseidon", "ps_server", "tests", "docs", "benchmarks", "scripts")
"""Folders of which every path that a page names must exist."""
DATA = ("examples", "prototxt", "machinefiles", "models", "data")
"""Folders in which jobs and scripts make databases and lists too."""
SUFFIXES = {".py", ".md", ".sh", ".proto", ".prototxt", ".sbatch", ".yaml", ".example", ".log"}
FOREIGN_FLAGS = {
    # accelerate, docker, kubectl, make, MPI, pip, ray, redis-server, sbatch, srun, ssh and torchrun
    *("--from-file", "--tail", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--standalone"),
    *("--shutdown-timeout", "--bind-to", "--host", "--map-by", "--mca", "--ntasks-per-node", "--nodes"),
    *("--gpus-per-node", "--signal", "--check", "--protected-mode", "--bind"),
    *("--rm", "--build-arg", "--env", "--gpus", "--build", "--detach", "--network", "--user"),
    *("--head", "--address", "--resources", "--cpu", "--num_processes"),
}  # fmt: skip

FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n?)+")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w./<-])([a-z_]+/[\w./*{},-]*)")
MODULE = re.compile(r"(?<![\w./~])((?:poseidon|ps_server|tests|benchmarks)(?:\.\w+)+)")
FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?![\w>])")
COMMAND = re.compile(r"(?:^|[`\n]|&& |; )poseidon ([a-z_0-9]+)")


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _named(page: str) -> Iterator[str]:
    """Yield each piece of code that a page shows: inline, fenced and indented."""
    text = _text(page)
    yield from FENCE.findall(text)
    rest = FENCE.sub("", text)
    yield from INDENTED.findall(rest)
    yield from CODE.findall(INDENTED.sub("", rest))


def _exists(path: str) -> bool:
    path = path.rstrip(".,").split("::")[0]
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def _unfold(path: str) -> list[str]:
    """Return the paths that `a/{b,c}.py` stands for."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [found[1] + part + found[3] for part in found[2].split(",")] if found else [path]


def every_path_exists(page: str) -> None:
    missing = []
    for code in _named(page):
        for match in PATH.finditer(code):
            for path in _unfold(match[1]):
                top = path.partition("/")[0]
                if code[match.end() : match.end() + 1] in ("<", "$"):
                    continue  # the rest of the path is the reader's
                made = path.startswith("examples/_temp")  # by the commands of the page
                if top in SOURCES or (top in DATA and Path(path).suffix in SUFFIXES and not made):
                    missing += [] if _exists(path) else [path]
    assert not missing, f"{page} names {missing}"


def every_module_exists(page: str) -> None:
    missing = [name for code in _named(page) for name in MODULE.findall(code) if not _module(name)]
    assert not missing, f"{page} names {missing}"


def _module(name: str) -> bool:
    """Return whether a dotted name is a module, or attributes of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (ROOT / "/".join(parts[:count])).with_suffix(".py").is_file() or (
            ROOT / "/".join(parts[:count])
        ).is_dir():
            break
    else:
        return False
    if count == len(parts):
        return True
    module = ".".join(parts[:count])
    if importlib.util.find_spec(module) is None:
        return False
    found: object = importlib.import_module(module)
    for part in parts[count:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def every_command_and_flag_exists(page: str) -> None:
    flags, known = _known_flags(), _source_text()
    for code in _named(page):
        for command in COMMAND.findall(code):
            assert command in COMMANDS, f"{page} names the command poseidon {command}"
        for flag in FLAG.findall(code):
            plain = "--" + flag[2:].removeprefix("no")
            found = flag in flags or plain in flags or flag in FOREIGN_FLAGS or f'"{flag}"' in known
            assert found, f"{page} names the flag {flag}"


@cache
def _known_flags() -> set[str]:
    of_commands = (flag for command in COMMANDS.values() for flag in command.parser().flags())
    flags = {f"--{name}" for flag in of_commands for name in flag.names}
    return flags | {*re.findall(r"--\w+", trainer_flags().format_help())}


@cache
def _source_text() -> str:
    folders = ("poseidon", "ps_server", "benchmarks", "tests", "examples", "scripts")
    return "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in {".py", ".sh", ""}
    )


def every_link_resolves(page: str) -> None:
    folder = (ROOT / page).parent
    for link in LINK.findall(FENCE.sub("", _text(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page} links to {link}"


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def prose_keeps_to_its_columns(page: str) -> None:
    text = INDENTED.sub("", FENCE.sub("", _text(page)))
    long = [
        line
        for line in text.splitlines()
        if len(line) > MOST_COLUMNS and not line.startswith(("|", "![", "#", "<!--"))
    ]
    assert not long, f"{page}: {long}"


@pytest.mark.parametrize(
    "check",
    [
        every_path_exists,
        every_module_exists,
        every_command_and_flag_exists,
        every_link_resolves,
        prose_keeps_to_its_columns,
    ],
)
def test_each_page(check: Callable[[str], None]) -> None:
    for page in PAGES:
        check(page)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    """Literal strings of the source are joined as Python joins them; `...` stands for what a
    message fills in.
    """
    source = re.sub(r'"\s*\n\s*f?"', "", _source_text())
    section = _text("docs/exit_codes.md").partition("## Messages")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) > 20
    missing = [
        piece
        for message in messages
        for piece in message.split("...")
        if len(piece.strip(" :'(),")) > 4 and piece.strip(" :'(),") not in source
    ]
    assert not missing


WIRE_PAGE = "docs/internals/wire_protocol.md"


def _rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    section = f"\n{_text(page)}".partition(f"\n{heading}\n")[2]
    lines = section[section.index("\n|") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_wire_page_lists_every_message_of_the_store_with_its_fields() -> None:
    """Of a message it counts the fields, which have names of their own on the page."""
    rows = _rows(WIRE_PAGE, "### Messages")
    listed = {(int(row[0]), row[1]) for row in rows}
    assert listed == {(number, kind.__name__) for number, kind in enumerate(frames.KINDS, 1)}
    for name, header in ((row[1], re.sub(r"\[.*?\]", "list", row[3])) for row in rows):
        packed = [frames.encode(x)[0] for x in MESSAGES if type(x).__name__ == name != "Create"]
        counts = {len(msgpack.unpackb(each)) - 3 for each in packed}
        assert counts <= {len([field for field in header.split(",") if field])}, name


def test_the_wire_page_has_the_legal_messages_of_each_state() -> None:
    listed = {
        row[0]: set(re.findall(r"[A-Z]\w+", row[1]))
        for row in _rows(WIRE_PAGE, "### States of a worker on a shard")
    }
    assert listed == {
        stage.value: {kind.__name__ for kind in legal} for stage, legal in LEGAL.items()
    }


def test_the_wire_page_has_the_versions_and_limits() -> None:
    versions = [int(row[3]) for row in _rows(WIRE_PAGE, "# Wire protocol") if row[3].isdecimal()]
    assert versions == [frames.PROTOCOL_VERSION, worker_links.VERSION, messages.PROTOCOL]
    limits = {row[0]: row[1] for row in _rows(WIRE_PAGE, "### Frames")}
    assert limits["frames of a packet"] == f"{frames.MAX_FRAMES:,}"
    assert limits["header"] == f"{frames.MAX_HEADER_BYTES >> 20} MiB"
    assert limits["payload of `Gather"] == f"{fields.MAX_PAYLOAD_BYTES >> 30} GiB"
    assert limits["workers, shards"].startswith(f"{settings.MAX_WORKERS:,}")
    assert limits["tables"] == f"{settings.MAX_TABLES:,}"
    assert limits["first message of a peer"] == f"{MAX_FIRST_BYTES >> 10} KiB"
    assert limits["frame"] == f"{MAX_FRAME_BYTES >> 30} GiB"
    assert limits["refused messages that are answered, per worker"] == f"{MAX_ANSWERED_FAULTS}"
    assert limits["collections that some workers are ahead of others"] == f"{MAX_OPEN_GATHERS:,}"
    assert limits["row tables"] == f"{MAX_ROW_TABLES:,}"
    assert limits["elements of a row"] == f"{MAX_ROW_ELEMENTS:,}"
    assert limits["GetRows` of a worker and row table that wait"] == f"{MAX_WAITING}"


def test_the_wire_page_has_the_numbers_of_the_placement() -> None:
    section = _text(WIRE_PAGE).partition("### Placement")[2].partition("\n### ")[0]
    numbers = {
        *(settings.CHUNK_ELEMENTS, settings.NORM_SEGMENT_ELEMENTS, SEGMENT_ELEMENTS),
        *(placement.LEAST_CHUNK_ELEMENTS, placement.SMALLEST_ELEMENTS),
        *(placement.PACKET_COST, placement.CHUNK_COST),
        placement.BALANCE,
    }
    shown = re.findall(r"\d[\d,.]*\d", section)  # of two digits or more
    assert set(shown) == {f"{number:,}" for number in numbers}


def test_the_wire_page_lists_every_message_of_the_process_group() -> None:
    modules = (ROOT / "poseidon/torch/process_group").glob("*.py")
    sent = {kind for path in modules for kind in re.findall(r'post\(\["(\w+)"', path.read_text())}
    section = _text(WIRE_PAGE).partition("The process group of scripts")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sent


def test_the_wire_page_lists_every_request_and_report_of_an_agent() -> None:
    heading = "## Agent protocol"
    text = _text(WIRE_PAGE).partition(heading)[2].partition("\n## ")[0]
    requests, _, reports = text.partition("The agent sends reports:")
    for listed, known in ((requests, messages.Request), (reports, messages.Report)):
        rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]*?) ?\|", listed, re.MULTILINE))
        assert {name: text for name, text in rows.items() if name != "kind"} == {
            kind.__name__: ", ".join(kind.__dataclass_fields__) for kind in get_args(known)
        }
    start = requests.partition("`StartProcess`")[2].splitlines()[0]
    assert not [name for name in ProcessSpec.__dataclass_fields__ if name not in start]
    ask = requests.partition("`Ask`")[2].splitlines()[0]
    assert set(re.findall(r"`(\w+)`", ask)) == {service.value for service in messages.Service}


def test_the_wire_page_lists_every_event_of_a_process() -> None:
    assert events.__doc__ is not None
    shown = re.findall(r'\{"event": "(\w+)"(.*?)\}\n', events.__doc__, re.DOTALL)
    rows = {row[0]: " ".join(row) for row in _rows(WIRE_PAGE, "## Launcher protocol")}
    assert set(rows) == {event for event, _ in shown}
    for event, more in shown:
        lacking = [key for key in re.findall(r'"(\w+)":', more) if key not in rows[event]]
        assert not lacking, event


def test_the_page_of_the_server_lists_every_module() -> None:
    package = ROOT / "ps_server"
    found = {
        str(path.relative_to(package))
        for path in (*package.glob("*.py"), *package.glob("protocol/*.py"))
    }
    listed = {
        name
        for row in _rows("ps_server/README.md", "## Modules")
        for name in re.findall(r"[\w/]+\.py", row[1])
    }
    assert listed == {name for name in found if not name.endswith("__init__.py")}


def test_the_page_on_installation_lists_every_extra() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8").partition("extras_require=")[2]
    listed = {row[0] for row in _rows("docs/installation.md", "## Choose extras")}
    assert listed == set(re.findall(r'"([\w-]+)": \w+_REQUIRES', setup))


def test_the_drawing_of_the_packages_is_true() -> None:
    """A package stands above all that it imports (`test_architecture.py` holds the imports to
    the code).
    """
    drawing = _text("docs/internals/architecture.md").partition("## Packages")[2].split("```")[1]
    height = {line.split()[0]: number for number, line in enumerate(drawing.strip().splitlines())}
    names = {package: re.sub(r"^poseidon\.|(?<=caffe)\..*", "", package) for package in MAY_IMPORT}
    assert set(height) == set(names.values())
    for package, imported in MAY_IMPORT.items():
        for other in imported:
            up = height[names[package]] > height[names[other]]
            assert not up, f"{package} imports {other}"
