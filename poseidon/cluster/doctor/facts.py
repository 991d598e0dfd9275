"""The facts of a host for `poseidon doctor`: it runs on the host, sent by `poseidon.cluster.doctor.survey`.

It reads one request from standard input and writes one answer, each a line of JSON:

    {"folder": "output", "names": ["node1", "10.0.0.2"]}

Law: standard library only, any Python from 3.7 on; it leaves no file.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

PACKAGES = ("torch", "pyzmq", "numpy", "msgpack", "lmdb", "paramiko")


def facts(folder: str, names: list[str]) -> dict[str, Any]:
    """Return what this host is and has.

    Args:
        folder: where jobs write.
        names: to resolve.
    """
    soft, hard = _file_limits()
    there = os.path.abspath(folder)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    return {
        "name": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "poseidon": _poseidon_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": os.getloadavg()[0],
        "processor": _processor(),
        "memory": _memory(),
        "gpus": _gpus(),
        "files": [soft, hard],
        "folder": there,
        "free": shutil.disk_usage(there).free,
        "writable": os.access(there, os.W_OK | os.X_OK),
        "names": {name: _addresses(name) for name in names},
        "interfaces": _interfaces(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _poseidon_version() -> str | None:
    try:
        return str(importlib.import_module("poseidon").__version__)
    except Exception:  # noqa: BLE001 - whatever its import raises
        return None


def _file_limits() -> tuple[int, int]:
    import resource  # there is none on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _first_value(path: str, key: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""


def _processor() -> dict[str, Any]:
    flags = set(_first_value("/proc/cpuinfo", "flags").split())
    wanted = ("sse4_1", "avx", "avx2", "fma", "avx512f")
    return {
        "model": _first_value("/proc/cpuinfo", "model name"),
        "vectors": [name for name in wanted if name in flags],
    }


def _memory() -> dict[str, int]:
    return {
        name: int((_first_value("/proc/meminfo", key) or "0").split()[0]) << 10
        for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))
    }


def _gpus() -> list[str] | None:
    """Return a line for each GPU of the driver; None where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=15
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interfaces() -> dict[str, dict[str, Any]]:
    """Return each network interface that is up: its `mtu`, and its `speed` in Mbit/s where the driver says it."""
    found: dict[str, dict[str, Any]] = {}
    for _, name in socket.if_nameindex():
        folder = os.path.join("/sys/class/net", name)
        if name == "lo" or _read(os.path.join(folder, "operstate")) == "down":
            continue
        speed, mtu = _read(os.path.join(folder, "speed")), _read(os.path.join(folder, "mtu"))
        found[name] = {
            "mtu": int(mtu) if mtu.isdigit() else None,
            "speed": int(speed) if speed.isdigit() and int(speed) else None,
        }
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    json.dump(facts(request["folder"], request["names"]), sys.stdout)
    print(flush=True)


if __name__ == "__main__":
    main()
