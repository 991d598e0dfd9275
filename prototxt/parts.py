"""What the scripts of this folder share: layers of many nets, data layers, headers and files.

Each net has a script beside its definitions, run from the repository root as `python -m
prototxt.<folder>.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P

# Rate and decay of a weight and of its bias, as Caffe's own models have them.
TWICE = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
MSRA = {"type": "msra"}
XAVIER = {"type": "xavier"}


def gaussian(std: float) -> dict[str, Any]:
    """Return a filler."""
    return {"type": "gaussian", "std": std}


def constant(value: float) -> dict[str, Any]:
    """Return a filler."""
    return {"type": "constant", "value": value}


def put(n: NetSpec, name: str, top: Any) -> Any:
    """Give a layer and its top a name; return the top."""
    n[name] = top
    return top


def relu(n: NetSpec, bottom: Any, name: str) -> Any:
    """Add a ReLU in place."""
    return put(n, name, L.ReLU(bottom, in_place=True))


def dropout(n: NetSpec, bottom: Any, name: str, ratio: float) -> Any:
    """Add a Dropout in place."""
    return put(n, name, L.Dropout(bottom, dropout_ratio=ratio, in_place=True))


def max_pool(
    n: NetSpec, bottom: Any, name: str, kernel: int = 3, stride: int = 2, **how: Any
) -> Any:
    """Add a pooling layer that takes maxima."""
    pool = L.Pooling(bottom, pool=P.Pooling.MAX, kernel_size=kernel, stride=stride, **how)
    return put(n, name, pool)


def mean_pool(n: NetSpec, bottom: Any, name: str, **how: Any) -> Any:
    """Add a pooling layer that takes means, of each whole map unless `how` has a kernel."""
    how = how or {"global_pooling": True}
    return put(n, name, L.Pooling(bottom, pool=P.Pooling.AVE, **how))


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, **how: Any) -> Any:
    """Add a convolution."""
    how = {"weight_filler": MSRA, **how}
    return put(n, name, L.Convolution(bottom, num_output=outputs, kernel_size=kernel, **how))


def normalized(n: NetSpec, bottom: Any, norm: str, scale: str, active: str = "", **how: Any) -> Any:
    """Add BatchNorm and Scale in place, and a ReLU if it has a name."""
    put(n, norm, L.BatchNorm(bottom, **{"in_place": True, **how}))
    top = put(n, scale, L.Scale(n[norm], in_place=True, bias_term=True))
    return relu(n, top, active) if active else top


def database(source: str, batch: int, phase: str, **how: Any) -> Any:
    """Return a Data layer of one phase."""
    return L.Data(include={"phase": phase}, data_param=records(source, batch), **how)


def records(source: str, batch: int) -> dict[str, Any]:
    """Return the fields of a layer that reads an LMDB."""
    return {
        "source": source,
        "backend": P.Data.LMDB,
        "batch_size": batch,
        "shared_file_system": True,
    }


def named(name: str, n: NetSpec) -> NetParameter:
    """Return a net with its name."""
    return NetParameter(name=name, layer=n.to_proto().layer)


def for_both_phases(name: str, train: NetSpec, test: NetSpec) -> NetParameter:
    """Return a net for training with the data layers of its tests after its own."""
    layers = train.to_proto().layer
    own = [layer for layer in layers if not layer.bottom]
    rest = [layer for layer in layers if layer.bottom]
    return NetParameter(name=name, layer=[*own, *test.to_proto().layer, *rest])


def header(about: str, paper: str, folder: str, *, run: str = "", expect: str = "") -> str:
    """Return the first lines of a definition.

    Args:
        about: what it is.
        paper: where it is from.
        folder: of its script, below prototxt/.
        run: its solver in that folder; empty: it is for use.
        expect: published accuracy.
    """
    how = f"# Run:     poseidon train --solver=prototxt/{folder}/{run}"
    lines = [
        f"# {about}",
        how if run else "# This one is for use after training.",
        f"# Expect:  {expect}",
        f"# From:    {paper}",
        f"# Written by prototxt/{folder}/generate.py: change that, not this.",
    ]
    return "\n".join(lines) + "\n\n"


def family(
    folder: str,
    member: str,
    about: str,
    train_val: NetParameter,
    deploy: NetParameter,
    solver: Mapping[str, Any],
    *,
    recipe: str,
    flags: str = "",
) -> dict[str, str]:
    """Return the text of each file of a net of a folder of several, by its name.

    Args:
        folder: below prototxt/.
        member: how the files of this net begin.
        about: what it is, and where it is from.
        train_val: the net for training.
        deploy: the net for use.
        solver: its fields besides `net` and the mode.
        recipe: how the solver trains it.
        flags: of `poseidon train`, besides the solver.
    """
    about = f"# {about}. Written by generate.py: change that, not this.\n"
    run = (
        f"# Run:     poseidon train --solver=prototxt/{folder}/{member}_solver.prototxt{flags}\n\n"
    )
    file = f"{member}_train_val.prototxt"
    return {
        file: f"{about}{run}{train_val}",
        f"{member}_deploy.prototxt": f"{about}# This one is for use after training.\n\n{deploy}",
        f"{member}_solver.prototxt": f"# {recipe}\n{run}{fields({'net': file, **solver})}solver_mode: GPU\n",
    }


def fields(settings: Mapping[str, Any]) -> str:
    """Return fields as prototxt spells them, a line each."""
    shown = {
        key: f'"{value}"' if isinstance(value, str) else value for key, value in settings.items()
    }
    return "".join(f"{key}: {value}\n" for key, value in shown.items())


def write(folder: str, definitions: Mapping[str, str]) -> None:
    """Put the files into their folder."""
    for name, text in definitions.items():
        (Path(__file__).parent / folder / name).write_text(text)
