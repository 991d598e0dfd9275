"""Random choices that depend on nothing but a seed and a record's number in the job.

Law: no state. The crop and the mirror of a record are a hash of (seed, record number), so they are the same
whichever worker draws them, in whichever thread, and after a resume; nothing has to be saved but the position.

Source: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), used as a counter-based generator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2^64 / golden ratio, odd


def draw(seed: int, numbers: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[np.int64]:
    """Uniform integers in 0 .. 2^31-1.

    Args:
        seed: of the job; the same on all its workers. Taken modulo 2^64.
        numbers: (N) record numbers.
        lanes: independent draws for each record.

    Returns:
        (N, lanes) draws, a pure function of seed, number and lane.
    """
    streams = _mix(np.array([seed % 2**64], np.uint64) + GOLDEN * np.arange(1, lanes + 1, dtype=np.uint64))
    counters = _mix(GOLDEN * numbers.astype(np.uint64))
    return (_mix(counters[:, None] ^ streams[None, :]) >> np.uint64(33)).astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
