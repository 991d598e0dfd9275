"""Random numbers that depend only on a seed and a record's number in the job.

Law: no state. The crop and the mirror of a record are a hash of (seed, record number), so they do
not depend on the worker, the thread or a resume. A snapshot needs only the position.

Source: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), used as a counter-based generator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2^64 / golden ratio, odd


def draw(seed: int, numbers: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[np.int64]:
    """Return uniform integers in 0 .. 2^31-1.

    Args:
        seed: the seed of the job, the same on all workers. Taken modulo 2^64.
        numbers: (N) record numbers.
        lanes: the number of independent values for each record.

    Returns:
        (N, lanes) values, a pure function of seed, number and lane.
    """
    streams = _mix(
        np.array([seed % 2**64], np.uint64) + GOLDEN * np.arange(1, lanes + 1, dtype=np.uint64)
    )
    counters = _mix(GOLDEN * numbers.astype(np.uint64))
    return (_mix(counters[:, None] ^ streams[None, :]) >> np.uint64(33)).astype(np.int64)


def skipped_records(seed: int, rand_skip: int) -> int:
    """Return the number of records to skip at the start, below `rand_skip` and the same on all
    workers.
    """
    return int(draw(seed, np.array([-1]), 1)[0, 0]) % rand_skip if rand_skip else 0


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
