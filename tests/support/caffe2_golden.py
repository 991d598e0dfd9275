"""What real Caffe2 computed, case by case; `check.py` beside the cases plays them through
poseidon.caffe2.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from poseidon.caffe2.workspace import RegisteredOperators
from tests.support.needs import SHARED

FOLDER = SHARED / "caffe2" / "golden"
MODULES = {
    "train": ("model_helper", "brew", "optimizer", "models"),
    "dpm": ("model_helper", "brew", "optimizer", "data_parallel_model"),
    "bmuf": ("model_helper", "brew", "optimizer", "data_parallel_model"),
    "dist": ("model_helper", "brew", "optimizer", "data_parallel_model"),
    "memonger": ("model_helper", "brew", "memonger", "models"),
    "inference": ("model_helper", "brew", "memonger", "models"),
    "files": ("model_helper", "brew", "predictor"),
}
"""The modules of poseidon.caffe2 that the cases of a kind use beside core and workspace."""
MODULES_OF_SCRIPTS = {
    "brew": ("model_helper", "brew"),
    "model": ("model_helper", "brew"),
    "shapes": ("model_helper", "brew"),
}


@cache
def cases() -> list[str]:
    """The names of the recorded cases whose operators and modules exist, e.g.

    `ops/relu`; none without the folder.
    """
    names = sorted(str(path.relative_to(FOLDER))[:-4] for path in FOLDER.glob("*/*.npz"))
    return [name for name in names if playable(name)]


def playable(name: str) -> bool:
    """Whether the package has the modules and operators that a case uses."""
    kind, _, case = name.partition("/")
    modules = MODULES.get(kind, ())
    if kind == "api":
        modules = MODULES_OF_SCRIPTS.get(case.partition("_")[0], ())
    if any(importlib.util.find_spec(f"poseidon.caffe2.{module}") is None for module in modules):
        return False
    texts = [path.read_text() for path in FOLDER.glob(f"{name}.*.pbtxt")]
    spec = str(np.load(FOLDER / f"{name}.npz", allow_pickle=False)["spec"])
    used = {kind for text in texts for kind in re.findall(r'^  type: "(\w+)"', text, re.MULTILINE)}
    used |= set(re.findall(r'"op": \["(\w+)"', spec)) | set(re.findall(r'\["([A-Z]\w+)", \[', spec))
    return used <= set(RegisteredOperators())


@cache
def player() -> Any:
    """The module that plays cases."""
    spec = importlib.util.spec_from_file_location("caffe2_golden_check", FOLDER / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mistakes(name: str) -> list[str]:
    """What of a case does not agree with Caffe2."""
    check = player()
    found = check.check(check.Root("poseidon.caffe2"), str(Path(FOLDER / f"{name}.npz")))
    return [f"{part}: {error}" for part, error in found if error]
