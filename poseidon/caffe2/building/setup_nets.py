"""What the nets of a task, or of a group, want to run before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from poseidon.caffe2 import core


class SetupNets:
    """An attribute of a net: nets that run before and after its task or its group."""

    def __init__(self, init_nets: Any = None, exit_nets: Any = None) -> None:
        self.init_nets = init_nets
        self.exit_nets = exit_nets

    def setup(self, init_net: Any) -> Any:
        """Return the nets that run before."""
        return self.init_nets

    def exit(self, exit_net: Any) -> Any:
        """Return the nets that run after."""
        return self.exit_nets


def get_setup_nets(
    key: str, steps_or_nets: Iterable[Any], target: Any
) -> tuple[list[Any], list[Any]]:
    """Return what the attributes of nets, under a key, want to run before and after them.

    An attribute has methods `setup(net)` and `exit(net)`, or one of them: they add operators to the
    net, or return a net, a step or a list of these. Each attribute is used once; one with a
    `_setup_target` for that target only.

    Raises:
        TypeError: a method returns something else.
    """
    nets = {"setup": core.Net(f"{key}/init"), "exit": core.Net(f"{key}/exit")}
    found: dict[str, list[Any]] = {"setup": [], "exit": []}
    attributes = [attribute for item in steps_or_nets for attribute in _attributes(item, key)]
    for attribute in attributes:
        if getattr(attribute, "_setup_used", False):
            continue
        if getattr(attribute, "_setup_target", target) != target:
            continue
        for method, net in nets.items():
            if hasattr(attribute, method):
                found[method] += _listed(getattr(attribute, method)(net))
                attribute._setup_used = True
    for method, net in nets.items():
        if net.Proto().op:
            found[method].insert(0, net)
    return found["setup"], found["exit"]


def _attributes(item: Any, key: str) -> list[Any]:
    if hasattr(item, "get_all_attributes"):
        return list(item.get_all_attributes(key))
    return list(item.get_attributes(key)) if hasattr(item, "get_attributes") else []


def _listed(made: Any) -> list[Any]:
    if isinstance(made, (list, tuple)):
        return list(made)
    if made is None or isinstance(made, (core.Net, core.ExecutionStep)):
        return [] if made is None else [made]
    raise TypeError(
        f"Unsupported type for setup: {type(made).__name__}; a net, a step or a list is expected"
    )


def add_setup_steps(
    step: Any, init_nets: Sequence[Any], exit_nets: Sequence[Any], name: str
) -> Any:
    """Return a step with others before and after it."""
    if not init_nets and not exit_nets:
        return step
    steps = [step]
    if init_nets:
        steps.insert(0, core.execution_step(f"{name}:init", list(init_nets)))
    if exit_nets:
        steps.append(core.execution_step(f"{name}:exit", list(exit_nets)))
    return core.execution_step(name, steps)
