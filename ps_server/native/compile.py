"""Compile the codecs in place: `python ps_server/native/compile.py`. It needs the standard library
alone, because `setup.py` runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("codecs.c")
FLAGS = (
    *("-std=c11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"),
    # Vectors without a change of bits: never -ffast-math, no contraction to fused operations.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def digest(source: bytes) -> str:
    """Return what a library says of the text that it was made of."""
    return hashlib.sha256(source).hexdigest()[:16]


def compile_codecs(folder: Path) -> bool:
    """Write `codecs.so` to a folder, or say in one line why it cannot be made.

    Returns:
        whether it was made; if not, none is left from before.
    """
    library = folder / "codecs.so"
    unfinished = folder / f"codecs.{os.getpid()}.partial"
    library.unlink(missing_ok=True)
    found = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    words = [*found.split(), *FLAGS, f'-DSOURCE="{digest(SOURCE.read_bytes())}"']
    reason = "no C compiler was found (cc, gcc or clang)"
    if found:
        try:
            subprocess.run([*words, str(SOURCE), "-o", str(unfinished)], check=True)
            unfinished.replace(library)
            return True
        except (OSError, subprocess.CalledProcessError) as error:
            unfinished.unlink(missing_ok=True)
            reason = str(error)
    print(
        f"Poseidon's codecs are not compiled: {reason}. They give the same results with torch, in "
        "several times the processor time. Install a compiler (Debian: gcc and libc6-dev), then "
        "install Poseidon again.",
        file=sys.stderr,
    )
    return False


if __name__ == "__main__":
    sys.exit(not compile_codecs(SOURCE.parent))
