"""Runs a program that looks at its own memory, in a process of its own whose malloc is set up for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def said_by(module: str, *words: str, malloc: Mapping[str, str]) -> Any:
    """The JSON value that a module prints, run with these words and malloc's variables."""
    child = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, **malloc, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(child.stdout)
