"""Poseidon: distributed deep learning for clusters on ordinary Ethernet.

`poseidon train` trains Caffe nets. `distribute` trains any torch module, in a script that `poseidon
run` starts (docs/torch_modules.md). `bind` lets scripts import Caffe and Caffe2 by their own names
(docs/pycaffe.md).

Law: the public names stand in `__init__.pyi` alone. Each is imported when it is used, and importing
this package imports nothing: commands that start, list and stop processes start without torch.
"""

from importlib import import_module

with open(f"{__file__}i", encoding="utf-8") as _stub:
    _lines = [line.split() for line in _stub if line.startswith("from ")]
_MODULE_OF = {name: module for _, module, _, name, *_ in _lines}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'poseidon' has no attribute '{name}'")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
