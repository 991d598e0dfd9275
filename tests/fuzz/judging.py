"""The oracle: a case that loads correctly, or is refused with one sentence, passes; anything
else is a finding.
"""

from __future__ import annotations

import resource
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from poseidon.errors import PoseidonError

# The longest ones list every layer type.
LONGEST_SENTENCE = 1100
SECONDS = 5.0
# What reading may take beyond twice the file: libraries' own buffers, and the small nets that are
# built.
ROOM = 96 << 20


class Outcome(Enum):
    """The outcome of a case."""

    LOADED = auto()
    REFUSED = auto()
    FOUND = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a case, with its message."""

    outcome: Outcome
    words: str = ""


def judge(load: Callable[[Path], None], path: Path) -> Verdict:
    """Read a file and return the verdict."""
    started, peak = time.process_time(), _peak()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(path)
        verdict = Verdict(Outcome.LOADED)
    except PoseidonError as error:
        verdict = _sentence(str(error))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        verdict = Verdict(Outcome.FOUND, traceback.format_exc(limit=-6))
    seconds, grown = time.process_time() - started, _peak() - peak
    if seconds > SECONDS:
        return Verdict(Outcome.FOUND, f"took {seconds:.1f} s")
    if grown > 2 * path.stat().st_size + ROOM:
        return Verdict(Outcome.FOUND, f"took {grown >> 20} MiB for {path.stat().st_size} bytes")
    return verdict


def _sentence(words: str) -> Verdict:
    if not words or len(words) > LONGEST_SENTENCE or not words.isprintable():
        return Verdict(
            Outcome.FOUND, f"no clear sentence ({len(words)} characters): {words[:600]!r}"
        )
    return Verdict(Outcome.REFUSED, words)


def _peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
