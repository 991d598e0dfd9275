"""`python -m poseidon.cluster.doctor.gpu_copies`: measure copies between the host and each GPU.

It prints a JSON list with an object for each GPU that torch sees: bytes a second from pinned memory
`to` the GPU, and `back`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

COPIES = 8


def rate(target: Tensor, source: Tensor, wait: Callable[[], None]) -> float:
    """Return the bytes a second of copies from one tensor to another.

    Args:
        wait: returns when they have ended.
    """
    for count in (1, COPIES):  # the first is not measured
        began_s = time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        wait()
    return COPIES * source.nbytes / (time.perf_counter() - began_s)


def wait_of(device: torch.device) -> Callable[[], None]:
    """Return what waits for the work of a device: not that of torch's current one."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def measure(devices: Sequence[torch.device], size_bytes: int = 64 << 20) -> list[dict[str, float]]:
    """Return the rates of each device."""
    found = []
    for device in devices:
        pinned = device.type == "cuda"
        host = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        there = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        wait = wait_of(device)
        found.append({"to": rate(there, host, wait), "back": rate(host, there, wait)})
    return found


if __name__ == "__main__":
    print(json.dumps(measure([torch.device("cuda", n) for n in range(torch.cuda.device_count())])))
