"""Steps for conditions and loops around nets and steps: `If`, `For`, `While`, `Switch`.

A condition is a blob, one boolean, or a net whose last external output is one; the net runs before
each test. Parts are nets or steps, one or several or a list. (Conditions and loops inside of nets
are in `control_ops_util`.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core

_numbers = itertools.count(1)
_used: set[str] = set()


def _name(kind: str, base: str) -> str:
    made = f"{base}/{kind}"
    while made in _used:
        made = f"{base}/{kind}_{next(_numbers)}"
    _used.add(made)
    return made


def _listed(parts: Sequence[Any]) -> list[Any]:
    """Return parts as a list, which may be given as such.

    Raises:
        ValueError: there are none.
    """
    if not parts:
        raise ValueError("There is no net and no step.")
    return list(parts[0]) if len(parts) == 1 and isinstance(parts[0], list) else list(parts)


def _are_nets(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, core.Net) for part in parts)


def _before(nets: Sequence[core.Net], parts: Any) -> list[Any]:
    after = _listed((parts,))
    return [*nets, *after] if _are_nets(after) else [Do("prepend", *nets), *after]


def _behind(parts: Any, nets: Sequence[core.Net]) -> list[Any]:
    first = _listed((parts,))
    return [*first, *nets] if _are_nets(first) else [*first, Do("append", *nets)]


def GetConditionBlobFromNet(condition_net: core.Net) -> core.BlobReference:
    """Return the last external output of a net.

    Raises:
        AssertionError: it has none.
    """
    outputs = condition_net.Proto().external_output
    assert outputs, f"Condition net {condition_net.Name()} must have at least one external output"
    return core.BlobReference(outputs[-1])


def _condition(blob_or_net: Any) -> tuple[Any, list[core.Net]]:
    """Return the blob of a condition, and the nets that make it."""
    if isinstance(blob_or_net, core.Net):
        return GetConditionBlobFromNet(blob_or_net), [blob_or_net]
    return core._get_blob_ref(blob_or_net), []


def _negated(blob_or_net: Any) -> tuple[core.BlobReference, list[core.Net]]:
    """Return the blob of the opposite of a condition, and the nets that make it."""
    _, nets = _condition(blob_or_net)
    not_net, blob = NotNet(blob_or_net)
    return blob, [*nets, not_net]


def BoolNet(*blobs_with_bool_value: Any) -> core.Net:
    """Return a net that sets blobs, its external outputs, given as pairs of blob and boolean."""
    net = core.Net("bool_net")
    for blob, value in _listed(blobs_with_bool_value):
        made = net.ConstantFill([], [blob], shape=[], value=value, dtype=core.DataType.BOOL)
        net.AddExternalOutput(made)
    return net


def NotNet(condition_blob_or_net: Any) -> tuple[core.Net, core.BlobReference]:
    """Return a net that makes the opposite of a condition, and its blob.

    A net given is not a part of it.
    """
    blob, _ = _condition(condition_blob_or_net)
    net = core.Net("not_net")
    made = net.Not(blob)
    net.AddExternalOutput(made)
    return net, made


def _copy_net(blob: Any) -> tuple[core.Net, core.BlobReference]:
    net = core.Net("copy_condition_blob_net")
    made = net.Copy(core._get_blob_ref(blob))
    net.AddExternalOutput(made)
    return net, made


def _related(net: core.Net, conditions: Sequence[core.BlobReference], relation: str) -> core.Net:
    result = conditions[0]
    for blob in conditions[1:]:
        result = getattr(net, relation)([result, blob])
    net.AddExternalOutput(result)
    return net


def MergeConditionNets(name: str, condition_nets: Any, relation: str) -> Any:
    """Return one net of condition nets; its last external output is their `And` or `Or`.

    One net is returned itself; None for an empty list.
    """
    if not isinstance(condition_nets, list):
        return condition_nets
    if len(condition_nets) <= 1:
        return condition_nets[0] if condition_nets else None
    merged = core.Net(name)
    for net in condition_nets:
        assert net.Proto().device_option == merged.Proto().device_option
        assert net.Proto().type == merged.Proto().type
        merged.Proto().op.extend(net.Proto().op)
        known = set(merged.Proto().external_input)
        made = (name for name in net.Proto().external_input if name not in known)
        merged.Proto().external_input.extend(made)
        for key, values in net._attr_dict.items():
            merged._attr_dict.setdefault(key, []).extend(values)
    return _related(merged, [GetConditionBlobFromNet(net) for net in condition_nets], relation)


def CombineConditions(name: str, condition_nets: Any, relation: str) -> core.Net | None:
    """Return a net that joins the conditions of nets that have run by `And` or `Or`, or None.

    Raises:
        ValueError: the nets are not a list.
    """
    if not condition_nets:
        return None
    if not isinstance(condition_nets, list):
        raise ValueError("condition_nets must be a list of nets.")
    blobs = [GetConditionBlobFromNet(net) for net in condition_nets]
    return _copy_net(blobs[0])[0] if len(blobs) == 1 else _related(core.Net(name), blobs, relation)


def _step(kind: str, name: str, parts: Sequence[Any], **options: Any) -> core.ExecutionStep:
    return core.scoped_execution_step(_name(kind, name), list(parts), **options)


def Do(name: str, *nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts in order, once."""
    parts = _listed(nets_or_steps)
    if len(parts) == 1 and isinstance(parts[0], core.ExecutionStep):
        return parts[0]
    return _step("Do", name, parts)


def DoParallel(name: str, *nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts at the same time."""
    parts = _listed(nets_or_steps)
    if len(parts) == 1 and isinstance(parts[0], core.ExecutionStep):
        return parts[0]
    steps = [
        part if isinstance(part, core.ExecutionStep) else core.to_execution_step(part)
        for part in parts
    ]
    return _step("DoParallel", name, steps, concurrent_substeps=True)


def _reset(
    name: str, blob: core.BlobReference, parts: Sequence[Any], step: core.ExecutionStep
) -> core.ExecutionStep:
    """Set the stop blob to false before a step of nets, which tests it after its first net."""
    return Do(name, BoolNet((blob, False)), step) if _are_nets(parts) else step


def _once(name: str, blob: Any, parts: Sequence[Any], kind: str) -> core.ExecutionStep:
    return _step(kind, name, parts, should_stop_blob=blob, only_once=True)


def _run_once_if(name: str, condition: Any, parts: Any) -> core.ExecutionStep:
    stop, nets = _negated(condition)
    every = _before(nets, parts)
    return _reset(f"{name}/_RunOnceIf", stop, every, _once(name, stop, every, "_RunOnceIf-inner"))


def _run_once_if_not(name: str, condition: Any, parts: Any) -> core.ExecutionStep:
    stop, nets = _condition(condition)
    if not nets:
        net, stop = _copy_net(condition)
        nets = [net]
    every = _before(nets, parts)
    return _reset(
        f"{name}/_RunOnceIfNot", stop, every, _once(name, stop, every, "_RunOnceIfNot-inner")
    )


def For(name: str, nets_or_steps: Any, iter_num: int) -> core.ExecutionStep:
    """Return a step that runs parts a number of times."""
    init, count = core.Net("init-net"), core.Net("For-iter")
    done = count.CountDown([init.CreateCounter([], init_count=iter_num)])
    body = _step("For-inner", name, _before([count], nets_or_steps), should_stop_blob=done)
    return Do(f"{name}/For", Do(f"{name}/For-init-net", init), body)


def While(name: str, condition_blob_or_net: Any, nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts again and again while a condition, tested before, is true."""
    stop, nets = _negated(condition_blob_or_net)
    every = _before(nets, nets_or_steps)
    return _reset(
        f"{name}/While", stop, every, _step("While-inner", name, every, should_stop_blob=stop)
    )


def Until(name: str, condition_blob_or_net: Any, nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts again and again until a condition, tested before, is true."""
    stop, nets = _condition(condition_blob_or_net)
    parts = _before(nets, nets_or_steps) if nets else _listed((nets_or_steps,))
    return _step("Until", name, parts, should_stop_blob=stop)


def DoWhile(name: str, condition_blob_or_net: Any, nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts, and again while a condition, tested behind them, is true."""
    stop, nets = _negated(condition_blob_or_net)
    body = _step("DoWhile-inner", name, _behind(nets_or_steps, nets), should_stop_blob=stop)
    return Do(f"{name}/DoWhile", BoolNet((stop, False)), body)


def DoUntil(name: str, condition_blob_or_net: Any, nets_or_steps: Any) -> core.ExecutionStep:
    """Return a step that runs parts, and again until a condition, tested behind them, is true.

    A condition that is a blob, and true before, ends the step behind its first part.
    """
    stop, nets = _condition(condition_blob_or_net)
    if not nets:
        return _step("DoUntil", name, _listed((nets_or_steps,)), should_stop_blob=stop)
    body = _step("DoUntil-inner", name, _behind(nets_or_steps, nets), should_stop_blob=stop)
    return Do(f"{name}/DoUntil", BoolNet((stop, False)), body)


def Switch(name: str, *conditions: Any) -> core.ExecutionStep:
    """Return a step that runs the parts of each true condition, given as pairs of both."""
    return _switch("Switch", name, conditions, _run_once_if)


def SwitchNot(name: str, *conditions: Any) -> core.ExecutionStep:
    """Return a step that runs the parts of every condition that is false; see `Switch`."""
    return _switch("SwitchNot", name, conditions, _run_once_if_not)


def _switch(kind: str, name: str, conditions: Sequence[Any], run: Any) -> core.ExecutionStep:
    steps = [run(f"{name}/{kind}", condition, parts) for condition, parts in _listed(conditions)]
    return _step(kind, name, steps)


def If(
    name: str, condition_blob_or_net: Any, true_nets_or_steps: Any, false_nets_or_steps: Any = None
) -> core.ExecutionStep:
    """Return a step that runs parts where a condition is true, and others where it is false."""
    return _choice("If", name, condition_blob_or_net, true_nets_or_steps, false_nets_or_steps)


def IfNot(
    name: str, condition_blob_or_net: Any, true_nets_or_steps: Any, false_nets_or_steps: Any = None
) -> core.ExecutionStep:
    """Return a step that runs parts where a condition is false, and others where it is true."""
    return _choice("IfNot", name, condition_blob_or_net, true_nets_or_steps, false_nets_or_steps)


def _choice(kind: str, name: str, condition: Any, parts: Any, others: Any) -> core.ExecutionStep:
    ways = (_run_once_if, _run_once_if_not)
    run, opposite = ways if kind == "If" else ways[::-1]
    if not others:
        return run(f"{name}/{kind}", condition, parts)
    steps = []
    if isinstance(condition, core.Net):
        # The condition is tested once, for both.
        blob = GetConditionBlobFromNet(condition)
        net, condition_blob = _copy_net(blob)
        steps.append(Do(f"{name}/{kind}-condition", condition, net))
        condition = condition_blob
    steps += [
        run(f"{name}/{kind}-true", condition, parts),
        opposite(f"{name}/{kind}-false", condition, others),
    ]
    return _step(kind, name, steps)
