"""Runs a program that measures its own memory, in a process with malloc settings for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def output_of(module: str, *arguments: str, malloc: Mapping[str, str]) -> Any:
    """Run a module with arguments and malloc's variables. Return the JSON value that it prints."""
    child = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **malloc, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(child.stdout)
