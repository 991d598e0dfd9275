"""Small nets for tests, written as prototxt text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.caffe.proto.text import layer_lines, parse


def definition(text: str, *, source: str = "net.prototxt") -> NetDefinition:
    """A definition that lies in no folder that matters."""
    param = parse(text, NetParameter(), source=source)
    return NetDefinition(
        param=param, source=source, layer_lines=tuple(layer_lines(text)), folder=Path()
    )


def build(
    text: str,
    *,
    phase: int = TRAIN,
    seed: int = 1,
    stages: tuple[str, ...] = (),
    share_with: Net | None = None,
    **place: Any,
) -> Net:
    """A compiled net of `phase`; `place` is its worker: rank, workers, seat."""
    state = NetState(phase=phase, stage=stages)  # type: ignore[arg-type]
    context = LayerContext(phase=phase, seed=seed, **place)
    return compile_net(definition(text), context, state=state, share_with=share_with)


def inputs(**shapes: tuple[int, ...]) -> str:
    """Input layers, one a blob."""
    return "\n".join(
        f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ shape {{ '
        + " ".join(f"dim: {extent}" for extent in shape)
        + " } } }"
        for name, shape in shapes.items()
    )


def layer(kind: str, bottoms: str, tops: str, body: str = "", *, name: str = "layer") -> str:
    """One layer; bottoms and tops are names with spaces between."""
    joined = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(
        f' top: "{t}"' for t in tops.split()
    )
    return f'layer {{ name: "{name}" type: "{kind}"{joined} {body} }}'


def stack(text: str) -> str:
    """Layers, one a line: `TYPE BOTTOMS > TOPS | BODY`. `x=2,3` among the bottoms adds an input x
    of that shape; the first layer is named `layer`, the others `layer2` and so on.
    """
    found = ""
    for number, line in enumerate(text.strip().splitlines(), 1):
        head, _, body = line.partition("|")
        kind, *blobs = head.split()
        bottoms = [blob.partition("=") for blob in blobs[: blobs.index(">")]]
        shapes = {name: tuple(map(int, axes.split(","))) for name, _, axes in bottoms if axes}
        tops = " ".join(blobs[blobs.index(">") + 1 :])
        own = "layer" if number == 1 else f"layer{number}"
        found += inputs(**shapes) + layer(
            kind, " ".join(b[0] for b in bottoms), tops, body, name=own
        )
    return found


def stacks(text: str, **words: str) -> dict[str, str]:
    """Nets by their names, one a line: `NAME: LAYER`, several layers with `;` between. Words in
    capitals stand for other text.
    """
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    pairs = (line.split(": ", 1) for line in text.strip().splitlines())
    return {name: stack(layers.replace("; ", "\n")) for name, layers in pairs}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal noise from a seed of its own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
