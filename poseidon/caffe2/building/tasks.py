"""What a `Task` is made with: its outputs, and the nets that set it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from poseidon.caffe2 import core, schema


class TaskOutput:
    """What a task hands out: a blob, blobs, or a record."""

    def __init__(self, names: Any) -> None:
        self._schema = names if isinstance(names, schema.Field) else None
        if self._schema is not None:
            names = self._schema.field_blobs()
        self._is_scalar = not isinstance(names, (list, tuple))
        self.names = [names] if self._is_scalar else list(names)
        self._values: list[Any] | None = None
        self._fetch_func: Callable[[Any], Any] | None = None

    def set(self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None) -> None:
        assert len(values) == len(self.names)
        self._values = list(values)
        self._fetch_func = _fetch_func

    def _formed(self, values: list[Any]) -> Any:
        if self._is_scalar:
            return values[0]
        return values if self._schema is None else schema.from_blob_list(self._schema, values)

    def get(self) -> Any:
        """Return the value, the values or the record.

        Raises:
            AssertionError: the task has not run.
        """
        assert self._values is not None, "Output value not set yet."
        return self._formed(self._values)

    def fetch(self) -> Any:
        """Return what the session fetches for the value, the values or the record."""
        assert self._fetch_func is not None, "Cannot fetch value for this output."
        assert self._values is not None, "Output value not set yet."
        return self._formed([self._fetch_func(value) for value in self._values])


class TaskOutputList:
    """The outputs of a task in one list."""

    def __init__(self, outputs: list[TaskOutput] | None = None) -> None:
        self.outputs = outputs or []

    def names(self) -> list[Any]:
        """Return the blobs of all outputs."""
        return [name for output in self.outputs for name in output.names]

    def set_values(
        self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None
    ) -> None:
        """Set the values of all outputs, in the order of `names`."""
        assert len(values) == len(self.names()), "Wrong number of output values."
        left = list(values)
        for output in self.outputs:
            output.set(left[: len(output.names)], _fetch_func)
            del left[: len(output.names)]


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
    raise TypeError(f"setup is a {type(made).__name__}, expected a net, a step or a list")


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
