"""Poseidon: distributed deep learning for clusters on ordinary Ethernet.

`poseidon train` trains Caffe nets. `distribute` trains any torch module, in a script that `poseidon
run` starts (docs/torch_modules.md). `bind` lets scripts import Caffe and Caffe2 by their own names
(docs/pycaffe.md).

Law: importing this package does not import torch. Access to a name of the engine imports it, so
that the commands that start, list and stop processes on a host start fast.
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))
):  # `python -m` searches the current folder before Python's own library
    sys.path.append(sys.path.pop(0))

from importlib import import_module
from typing import TYPE_CHECKING

from poseidon.binding import bind
from poseidon.errors import PoseidonError
from poseidon.version import __version__

if TYPE_CHECKING:
    from poseidon.cli.function import launch
    from poseidon.torch.distribute import distribute, log, this_worker
    from poseidon.torch.group import Group
    from poseidon.torch.optimizer_group import OptimizerGroup
    from poseidon.torch.rule_group import RuleGroup
    from poseidon.torch.sampler import SharedSampler
    from poseidon.torch.tables.rules import RowWiseAdaGrad
    from poseidon.torch.tables.table import Table
    from poseidon.torch.update_rules import (
        SGD,
        AdaDelta,
        AdaGrad,
        Adam,
        AdamW,
        Lion,
        Muon,
        Outer,
        ParameterGroup,
        RMSProp,
    )
    from poseidon.torch.worker_context import ThisWorker

__all__ = [
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Muon",
    "OptimizerGroup",
    "Outer",
    "ParameterGroup",
    "PoseidonError",
    "RMSProp",
    "RowWiseAdaGrad",
    "RuleGroup",
    "SharedSampler",
    "Table",
    "ThisWorker",
    "__version__",
    "bind",
    "distribute",
    "launch",
    "log",
    "this_worker",
]

if not TYPE_CHECKING:
    _MODULES = {
        "distribute": ("distribute", "log", "this_worker"),
        "group": ("Group",),
        "optimizer_group": ("OptimizerGroup",),
        "rule_group": ("RuleGroup",),
        "sampler": ("SharedSampler",),
        "tables.table": ("Table",),
        "tables.rules": ("RowWiseAdaGrad",),
        "update_rules": (
            "SGD",
            "AdaDelta",
            "AdaGrad",
            "Adam",
            "AdamW",
            "Lion",
            "Muon",
            "Outer",
            "ParameterGroup",
            "RMSProp",
        ),
        "worker_context": ("ThisWorker",),
    }
    _MODULE_OF = {
        "launch": "poseidon.cli.function",
        **{
            name: f"poseidon.torch.{module}" for module, names in _MODULES.items() for name in names
        },
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'poseidon' has no attribute '{name}'")
        return getattr(import_module(_MODULE_OF[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
