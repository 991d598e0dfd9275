"""Poseidon: distributed deep learning for clusters on ordinary Ethernet.

Nets of Caffe are trained by `poseidon train`; any torch module by `distribute`, in a script that `poseidon run` starts
(docs/torch_modules.md).
"""

from poseidon.engine.distribute import distribute, this_worker
from poseidon.engine.group import Group
from poseidon.engine.optimizer_group import OptimizerGroup
from poseidon.engine.rule_group import RuleGroup
from poseidon.engine.sampler import SharedSampler
from poseidon.engine.update_rules import SGD, AdaDelta, AdaGrad, Adam, Nesterov, ParameterGroup, RMSProp
from poseidon.engine.workplace import ThisWorker
from poseidon.errors import PoseidonError

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Group",
    "Nesterov",
    "OptimizerGroup",
    "ParameterGroup",
    "PoseidonError",
    "RMSProp",
    "RuleGroup",
    "SharedSampler",
    "ThisWorker",
    "__version__",
    "distribute",
    "this_worker",
]
