"""Compile the codecs in place: `python ps_server/native/compile.py`. It needs the standard library
alone, because `setup.py` runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))
FLAGS = (
    *("-std=c11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"),
    # Vectors without a change of bits: never -ffast-math, no contraction to fused operations.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def digest(sources: Sequence[Path]) -> str:
    """Return what a library says of the files that it was made of."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def compile_codecs(folder: Path) -> bool:
    """Write `codecs.so` to a folder, or say in one line why it cannot be made.

    Returns:
        whether it was made; if not, none is left from before.
    """
    library = folder / "codecs.so"
    unfinished = folder / f"codecs.{os.getpid()}.partial"
    library.unlink(missing_ok=True)
    found = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    words = [*found.split(), *FLAGS, f'-DSOURCE="{digest(SOURCES)}"']
    words += [str(source) for source in SOURCES if source.suffix == ".c"]
    reason = "no C compiler was found (cc, gcc or clang)"
    if found:
        try:
            subprocess.run([*words, "-o", str(unfinished), "-lm"], check=True)
            unfinished.replace(library)
            return True
        except (OSError, subprocess.CalledProcessError) as error:
            unfinished.unlink(missing_ok=True)
            reason = str(error)
    print(
        f"Poseidon's codecs are not compiled: {reason}. They give the same results with torch, in "
        "several times the processor time. Install a compiler (Debian: gcc and libc6-dev); `python -m "
        "ps_server.native` then says what to run.",
        file=sys.stderr,
    )
    return False


if __name__ == "__main__":
    sys.exit(not compile_codecs(Path(__file__).parent))
