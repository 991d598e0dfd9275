"""What a worker knows of its GPU beside torch's tensors: how busy it is, and which cores of the host
are near it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from poseidon.exchange.device import used_memory

SYSFS = Path("/sys")


def gpu_reading(device: torch.device) -> dict[str, float]:
    """Return the memory in use on a GPU by all processes and the whole memory, in bytes; with the
    extra `gpu` (nvidia-ml-py) also the busy part of the time, 0..1, and the temperature in degrees
    Celsius. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    found: dict[str, float] = {}
    with suppress(RuntimeError):
        used, total = used_memory(device)
        found |= {"memory_bytes": used, "total_bytes": total}
    # no nvidia-ml-py, or a driver, or a MIG instance, that does not say it
    with suppress(Exception):
        found["busy"] = torch.cuda.utilization(device) / 100
    with suppress(Exception):
        found["temperature_c"] = torch.cuda.temperature(device)
    return found


def bind_to_gpu(device: torch.device, sysfs: Path = SYSFS) -> None:
    """Let the calling thread, and those that it starts, run on the cores of the host that are near
    a GPU, where the system names such among those that the process may use.
    """
    if device.type != "cuda":
        return
    known: Any = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_bus_id"):  # of an older torch
        return
    place = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    near = cores_beside(place, sysfs)
    if near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near & os.sched_getaffinity(0))


def cores_beside(address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; empty: unknown.

    Args:
        address: as 0000:3b:00.0.
        sysfs: where the kernel's sysfs is.

    The format: `Documentation/ABI/testing/sysfs-bus-pci` of Linux, `local_cpulist`: 0-15,32-47.
    """
    try:
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii")
        edges = [part.partition("-") for part in text.strip().split(",") if part]
        return {core for low, _, high in edges for core in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()
