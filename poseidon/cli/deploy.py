"""`poseidon deploy`: the deploy net of a net that trains."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from poseidon.base.hints import own_command, short_path
from poseidon.caffe.export.deploy import deploy_net
from poseidon.caffe.layers.base import times
from poseidon.caffe.layers.user_modules import import_modules
from poseidon.caffe.net.compile import filter_phase
from poseidon.caffe.proto.caffe_pb2 import TEST, TransformationParameter
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.proto.text import to_text
from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Write the deploy net, and print what it takes and returns; 0 when it is written."""
    path: Path = arguments.net
    target: Path = arguments.output or path.with_name(deploy_name(path))
    if arguments.output is None and target.exists():
        raise UsageError(f"{target} exists; name the file to write: {path} OUTPUT")
    import_modules(arguments.imports)
    definition = read_net(path)
    net = deploy_net(
        definition, dict(arguments.input), batch=arguments.batch, stages=arguments.stage
    )
    outputs = [(name, net.blob_shapes[name]) for name, _ in net.plan.outputs]
    named = [
        ", ".join(f"{name} ({times(shape)})" for name, shape in blobs)
        for blobs in (net.input_shapes.items(), outputs)
    ]
    net.close()
    head = f"# The deploy net of {path.name}, written by `poseidon deploy`.\n"
    write_atomically(target, (head + to_text(net.definition.param)).encode())
    print(f"Wrote {target}: {named[0]} to {named[1]}.")
    test = filter_phase(definition, definition.state(TEST, stages=arguments.stage))
    transform = next(
        (layer.transform_param for layer in test.param.layer if not layer.bottom),
        TransformationParameter(),
    )
    flags = ""
    if transform.mean_file:
        flags += f" --mean={shlex.quote(short_path(definition.resolve(transform.mean_file)))}"
    elif transform.mean_value:
        flags += f" --mean={','.join(f'{value:g}' for value in transform.mean_value)}"
    if transform.scale != 1:
        flags += f" --scale={transform.scale:g}"
    written = shlex.quote(short_path(target))
    print(f"To classify a picture: {own_command()} classify {written} MODEL PICTURE{flags}")
    return 0


def deploy_name(path: Path) -> str:
    """Return the usual name of the deploy net of a definition.

    >>> deploy_name(Path("lenet_train_test.prototxt")), deploy_name(Path("train_val.prototxt"))
    ('lenet_deploy.prototxt', 'deploy.prototxt')
    """
    stem = path.stem
    for ending in ("train_test", "train_val", "trainval", "train", "test"):
        if stem == ending or stem.endswith(f"_{ending}"):
            return f"{stem.removesuffix(ending)}deploy.prototxt"
    return f"{stem}_deploy.prototxt"
