"""Selection of a net's layers by phase, level and stage.

Law: exactly Caffe's rules (Net::FilterNet, Net::StateMeetsRule). A layer without rules is always
included. A layer with `include` rules is included if the state meets one of them; a layer with
`exclude` rules is excluded if the state meets one of them; a layer may not have both. The order of
the layers is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetState, NetStateRule
from poseidon.caffe.proto.definition import NetDefinition


def meets(state: NetState, rule: NetStateRule) -> bool:
    """Return whether the state meets every condition of the rule. An empty rule is always met.

    Args:
        state: the phase, level and stages that the net is built for.
        rule: phase equal; min_level <= level <= max_level; every `stage` set; no `not_stage` set.
    """
    stages = set(state.stage)
    return (
        (not rule.HasField("phase") or rule.phase == state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and stages.issuperset(rule.stage)
        and stages.isdisjoint(rule.not_stage)
    )


def is_included(layer: LayerParameter, state: NetState) -> bool:
    """Return whether a layer is part of the net of this state.

    The layer has rules of at most one kind.
    """
    if layer.include:
        return _meets_any(state, layer.include)
    return not _meets_any(state, layer.exclude)


def filter_net(definition: NetDefinition, state: NetState) -> NetDefinition:
    """Return the definition with only the layers that belong to `state`.

    Raises:
        DefinitionError: a layer has both include and exclude rules.
    """
    for index, layer in enumerate(definition.param.layer):
        if layer.include and layer.exclude:
            raise definition.error(
                index, "has both include and exclude rules; expected rules of one kind"
            )
    kept = [
        index for index, layer in enumerate(definition.param.layer) if is_included(layer, state)
    ]
    return definition.with_layers(kept)


def _meets_any(state: NetState, rules: Iterable[NetStateRule]) -> bool:
    return any(meets(state, rule) for rule in rules)
