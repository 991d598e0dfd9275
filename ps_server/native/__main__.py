"""Say whether the codecs are compiled: `python -m ps_server.native`; exit code 1 if they are not."""

import sys
from pathlib import Path

from ps_server import native

if __name__ == "__main__":
    if native.LIBRARY is None:
        raise SystemExit(
            "the codecs compute with torch, because they were not compiled, or for a different "
            "version; install a C compiler (Debian: gcc and libc6-dev), then run: "
            f"{sys.executable} {Path(__file__).with_name('compile.py')}"
        )
    print(f"the codecs are compiled; they use {native.LIBRARY.level.name}")
