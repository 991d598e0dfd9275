"""The check of a host before a job starts, on that host: its agent asks for the launcher.

Law: it imports no torch, and leaves no file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from poseidon.base import paths
from poseidon.base.durable import obstacle_to
from poseidon.base.paths import module_file, no_module
from poseidon.base.settings import visible_gpus
from poseidon.cluster.jobs.this_host import job_at
from poseidon.cluster.python_command import module_arguments
from poseidon.errors import PoseidonError
from poseidon.version import __version__

GPU_COPIES = "poseidon.cluster.doctor.gpu_copies"
"""The module that measures copies to each GPU and back."""
PACKAGES = ("torch", "pyzmq", "numpy", "msgpack", "lmdb", "paramiko")
"""The packages whose versions a description has."""
FILES_OF_A_PROCESS, FILES_OF_A_PEER = 64, 4
"""Of a worker; of the launcher, for each process that it starts."""
PORT_REMEDY = "give the client a different port in the machinefile, or 0 for a free one"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededFile:
    """A file or folder that a definition names.

    Attributes:
        name: as the definition has it.
        folder: of the definition, as `poseidon.base.paths.portable` returns it.
        instead: names of which any one in the same folder replaces it: `db_3` for the part of
            client 3; empty: itself.
    """

    name: str
    folder: str
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What the processes of a host need.

    Attributes:
        id: of the host in the machinefile.
        addresses: names and addresses at which the others may reach it, best first.
        ports: of its shards; 0 takes any.
        devices: numbers of the GPUs of its workers.
        folders: to write to.
        prefixes: of snapshots, with the folder of the definition that names them.
        files: to read.
        modules: of Python, to import.
        runs: the module that the workers run; empty: none.
        peers: other processes of the job, which each of its processes may have connections with.
    """

    id: int
    addresses: tuple[str, ...]
    ports: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    files: tuple[NeededFile, ...] = ()
    modules: tuple[str, ...] = ()
    runs: str = ""
    peers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The request.

    Attributes:
        clients: what the processes of each of the host's lines in the machinefile need.
        job: that asks; empty: none.
        describe: whether `poseidon doctor` asks, for the host's description.
        folder: where jobs write, of the description.
        names: to resolve, of the description.
        space_bytes: the least free disk space for logs and snapshots.
    """

    clients: tuple[HostNeeds, ...] = ()
    job: str = ""
    describe: bool = False
    folder: str = ""
    names: tuple[str, ...] = ()
    space_bytes: int = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The answer.

    Attributes:
        torch: the version; None: there is none.
        addresses: at which each of its lines in the machinefile is reached, by id; None: at none.
        problems: a sentence each.
        description: for `poseidon doctor`; empty where none was asked for.
    """

    torch: str | None
    addresses: Mapping[int, str | None]
    problems: tuple[str, ...]
    description: Mapping[str, Any] = field(default_factory=dict)


def answer(check: Check) -> HostFacts:
    """Return the facts, and a sentence for each problem."""
    problems: list[str] = []
    addresses = {}
    torch = _version("torch")
    if torch is None:
        problems.append(f"{sys.executable} has no torch")
    for client in check.clients:
        own = addresses[client.id] = _address(client, problems)
        if own is not None:
            found = (port_problem(own, port, check.job) for port in client.ports)
            problems += [problem for problem in found if problem]
        for folder in client.folders:
            _check_folder(os.path.abspath(folder), check.space_bytes, problems)
        _check_modules(client.modules, problems)
        if client.runs and module_file(client.runs) is None:
            problems.append(no_module(client.runs))
        _check_files(client, check.space_bytes, problems)
        _check_connections(client.peers, problems)
    _check_devices(check.clients, problems)
    return HostFacts(
        torch=torch,
        addresses=addresses,
        problems=tuple(dict.fromkeys(problems)),
        description=_description(check) if check.describe else {},
    )


def _description(check: Check) -> dict[str, Any]:
    import resource  # there is none on Windows

    memory = psutil.virtual_memory()
    there = _existing(os.path.abspath(check.folder))
    return {
        "name": socket.gethostname(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "poseidon": __version__,
        "packages": {package: _version(package) for package in PACKAGES},
        "cores": cores(),
        "load": os.getloadavg()[0],
        "processor": _processor(),
        "memory": {"total": memory.total, "available": memory.available},
        "gpus": (gpus := _gpus()),
        "gpu_system": _gpu_system() if gpus else {},
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": there,
        "free": shutil.disk_usage(there).free,
        "writable": os.access(there, os.W_OK | os.X_OK),
        "names": {name: _resolved(name) for name in check.names},
        "interfaces": _interfaces(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _address(client: HostNeeds, problems: list[str]) -> str | None:
    """Return the first of the addresses that is this host's own."""
    own = None
    for name in (*client.addresses, *_ssh_address()):
        for address in _addresses_of(name):
            if own is None and _bindable(address, 0) is None:
                own = address
    if own is None:
        problems.append(f"none of {', '.join(client.addresses)} is an address of this host")
    return own


def port_problem(address: str, port: int, own_job: str = "") -> str | None:
    """Return a sentence on why a shard cannot listen at an address; None where it can.

    Args:
        address: one of this host's own.
        port: in the machinefile; 0 takes any.
        own_job: of the shard; empty: none.
    """
    why = _bindable(address, port)
    if why is None:
        return None
    job = _job_at(address, port)
    if job and job == own_job:
        return (
            f"port {port} of {address} cannot be used: earlier processes of this job still run on "
            "this host; it can take part when they have ended"
        )
    by = f" by the running job {job}" if job else ""
    return f"port {port} of {address} cannot be used: {why}{by}; {PORT_REMEDY}"


def _job_at(address: str, port: int) -> str | None:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        return job_at(str(found[0][4][0]), port)
    except (OSError, PoseidonError):
        return None  # the port is reported without it


def _ssh_address() -> list[str]:
    """Return the address of this host in the SSH connection, which a name of ~/.ssh/config does
    not show.
    """
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2:3]


def _addresses_of(name: str) -> list[str]:
    """Resolve a name on this host; return loopback addresses only where the name is one."""
    try:
        found = [entry[4] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []
    addresses = [_with_scope(entry) for entry in found]
    remote = [
        address for address in addresses if not address.startswith("127.") and address != "::1"
    ]
    return addresses if name in addresses or name == "localhost" else remote


def _with_scope(entry: tuple[Any, ...]) -> str:
    """Return an address, with its interface where it needs one."""
    if len(entry) == 4 and entry[3] and "%" not in entry[0]:
        return f"{entry[0]}%{socket.if_indextoname(entry[3])}"
    return str(entry[0])


def _bindable(address: str, port: int) -> str | None:
    """Return why no process can listen at an address; None when one can."""
    try:
        family, kind, protocol, _, bound = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(bound)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _check_folder(folder: str, space_bytes: int, problems: list[str]) -> None:
    obstacle, free = obstacle_to(Path(folder)), shutil.disk_usage(_existing(folder)).free
    if obstacle:
        problems.append(f"cannot write to {folder}: {obstacle}")
    elif free < space_bytes:
        problems.append(f"{free >> 20} MiB are free for {folder}; expected {space_bytes >> 20} MiB")


def _existing(folder: str) -> str:
    """Return the folder itself, or the nearest one above it that is there."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _check_modules(modules: Sequence[str], problems: list[str]) -> None:
    if modules and not {"", os.getcwd()} & set(sys.path):
        sys.path.append("")  # where workers find them; last, as for these
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            problems.append(f"there is no Python module {module}, which --import names")


def _check_files(client: HostNeeds, space_bytes: int, problems: list[str]) -> None:
    """Check the files, found by the rules that the definitions follow."""
    for file in client.files:
        here = Path(file.folder).absolute()
        path = paths.resolve(file.name, folder=here)
        if not path.exists():  # a part may decide which folder is meant
            parts = [
                paths.resolve(str(Path(file.name).with_name(other)), folder=here)
                for other in file.instead
            ]
            path = next((part for part in parts if part.exists()), path)
        candidates = [str(path.with_name(other)) for other in file.instead or (path.name,)]
        if not any(os.path.exists(each) for each in candidates):
            whole = path.with_name(Path(file.name).name)
            shared = file.instead and whole.exists()
            hint = (
                f"; write shared_file_system: true if all clients can read {whole}"
                if shared
                else ""
            )
            problems.append("there is no {}{}".format(" or ".join(candidates), hint))
        elif not any(os.access(each, os.R_OK) for each in candidates if os.path.exists(each)):
            problems.append("{} may not be read by this user".format(" or ".join(candidates)))
    for prefix, folder in client.prefixes:
        parent = paths.resolve_prefix(prefix, folder=Path(folder).absolute()).parent
        _check_folder(str(parent), space_bytes, problems)


def _check_connections(peers: int, problems: list[str]) -> None:
    """Check the highest limit of open files, to which processes raise theirs."""
    import resource  # there is none on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_PROCESS + FILES_OF_A_PEER * peers
    if most != resource.RLIM_INFINITY and most < needed:
        problems.append(
            f"a process of this job opens up to {needed} files and connections, but may open "
            f"{most}; raise the hard limit (/etc/security/limits.conf, or the container's --ulimit "
            "nofile)"
        )


def _check_devices(clients: Sequence[HostNeeds], problems: list[str]) -> None:
    """Check the GPUs by the driver's device files: torch would take seconds and memory."""
    wanted = max([device for client in clients for device in client.devices] or [-1])
    if wanted < 0:
        return
    files = os.listdir("/dev") if os.path.isdir("/dev") else []
    there = sum(name[:6] == "nvidia" and name[6:].isdigit() for name in files)
    if not there and "dxg" in files:
        return  # Windows has the driver (WSL), which shows no GPU here: the worker looks for it
    names = visible_gpus()
    found = there if names is None else _count_visible(names, there)
    if found <= wanted:
        only = "" if names is None else f" by CUDA_VISIBLE_DEVICES={','.join(names)}"
        problems.append(f"there is no GPU {wanted}: {found} found{only}")


def _count_visible(names: Sequence[str], there: int) -> int:
    """Return how many GPUs a process of CUDA sees.

    Args:
        names: in CUDA_VISIBLE_DEVICES. CUDA ignores what follows a number that is not there. It
            shows a process one MIG instance at most.
        there: GPUs of the driver.
    """
    if names and names[0].startswith("MIG-"):
        return min(1, there)
    count = 0
    for name in names:
        if not (int(name) < there if name.isdecimal() else name.startswith("GPU-") and there):
            break
        count += 1
    return count


def _processor() -> dict[str, Any]:
    """Return what the first processor is, where the system says it."""
    known: dict[str, str] = {}
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8", "backslashreplace").partition("\n\n")[0]
        parts = (line.partition(":") for line in first.splitlines())
        known = {name.strip(): value.strip() for name, _, value in parts}
    flags = known.get("flags", "").split()
    wanted = ("sse4_1", "avx", "avx2", "fma", "avx512f")
    return {
        "model": known.get("model name", ""),
        "vectors": [name for name in wanted if name in flags],
    }


def _gpus() -> list[str] | None:
    """Return a line for each GPU of the driver; None where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    return _lines(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )


def _gpu_system() -> dict[str, Any]:
    """Return the version of NCCL, how the GPUs are connected, as nvidia-smi draws it, and the rates
    of copies to each and back, in bytes a second.
    """
    nccl = [
        found.version
        for found in importlib.metadata.distributions()
        if (found.name or "").startswith("nvidia-nccl")
    ]
    copies = _lines(sys.executable, *module_arguments(GPU_COPIES), timeout_s=60)
    try:
        rates = json.loads(copies[-1]) if copies else []
    except ValueError:
        rates = []
    return {
        "nccl": "".join(nccl[:1]),
        "topology": _lines("nvidia-smi", "topo", "--matrix"),
        "copies": rates,
    }


def _lines(*command: str, timeout_s: float = 15) -> list[str]:
    """Return the lines that a program prints; none if it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        done.stdout.decode(errors="backslashreplace").splitlines() if done.returncode == 0 else []
    )


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interfaces() -> dict[str, dict[str, int | None]]:
    """Return each network interface that is up: its `mtu`, and its `speed` in Mbit/s where the
    driver says it.
    """
    return {
        name: {"mtu": found.mtu or None, "speed": found.speed or None}
        for name, found in psutil.net_if_stats().items()
        if found.isup and name != "lo"
    }
