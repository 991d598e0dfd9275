#!/usr/bin/env python3
"""Stop the feature extractions that were started from a machinefile: scripts/kill_feature_extractor.py <hostfile>

Leaves training jobs of the same machinefile alone; `poseidon kill` stops one job by its id. Needs no installation
of Poseidon itself, and works from any folder.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

try:
    import paramiko  # noqa: F401
    import psutil  # noqa: F401
except ImportError:
    # The system's Python lacks them; the checkout's own environment (`make setup`) has them.
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        sys.exit(
            "kill_feature_extractor.py needs the Python packages psutil and paramiko; run `make setup` once"
        )
    os.execv(python, [str(python), __file__, *sys.argv[1:]])

from poseidon.cli.kill import kill_feature_extractor  # noqa: E402

if __name__ == "__main__":
    sys.exit(kill_feature_extractor(sys.argv[1:]))
