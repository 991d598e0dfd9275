#!/usr/bin/env python3
"""Fetch a model's weights: scripts/download_model_binary.py models/bvlc_reference_caffenet

The same as `poseidon download_model_binary`, under the name that Caffe's users know; works from any folder.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

try:
    from poseidon.cli.main import main
except ImportError:
    # The system's Python lacks the packages; the checkout's own environment (`make setup`) has them.
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        sys.exit("download_model_binary.py needs Poseidon's packages; run `make setup` once")
    os.execv(python, [str(python), __file__, *sys.argv[1:]])

if __name__ == "__main__":
    sys.exit(main(["download_model_binary", *sys.argv[1:]]))
