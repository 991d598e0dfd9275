"""The commands that make files of nets and models: deploy, export, import, draw_net, consolidate;
and classify.
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pydot

from poseidon.base.foreign_files import read_definition
from poseidon.base.paths import own_command, short_path
from poseidon.base.text_files import text_of
from poseidon.caffe.export.deploy import deploy_net
from poseidon.caffe.export.formats import (
    check_suffix,
    import_weights,
    open_for_inference,
    read_tensors,
    write_net,
)
from poseidon.caffe.export.modules import (
    CHECKPOINT,
    names_module,
    write_checkpoint_tensors,
    write_module,
)
from poseidon.caffe.export.net import inference_definition
from poseidon.caffe.layers.base import LayerContext, Shape, times
from poseidon.caffe.layers.registry import import_modules
from poseidon.caffe.net.compile import checked_layers, filter_phase
from poseidon.caffe.proto.caffe_pb2 import TEST, TransformationParameter
from poseidon.caffe.proto.definition import NetDefinition, filter_net, read_net
from poseidon.caffe.proto.text import to_text
from poseidon.caffe.tools.preflight import runs_users_code
from poseidon.caffe.tools.solo import NetRequest, PictureScores, open_net
from poseidon.caffe2.export.files import is_caffe2, read_predictor
from poseidon.caffe2.export.net import write_predictor
from poseidon.cli.nets import one_device
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import DataError, UsageError, counted
from poseidon.pycaffe.draw import extension_of, get_pydot_graph, render
from poseidon.pycaffe.net_picture import picture_graph
from poseidon.torch.checkpoint_file import consolidate
from ps_server.numerics import prepare_process


def run_deploy(arguments: argparse.Namespace) -> int:
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


def run_export(arguments: argparse.Namespace) -> int:
    """Write the net, and print what it takes and returns; 0 when it is written."""
    check_suffix(arguments.output)
    model, weights, shapes = arguments.model, arguments.weights, dict(arguments.input)
    if names_module(model):
        if weights is None:
            raise UsageError(f"the weights of {model} are missing: name a checkpoint after it")
        line = write_module(model, weights, shapes, arguments.output)
    elif weights is None and model.suffix == CHECKPOINT:
        line = write_checkpoint_tensors(model, arguments.output)
    elif is_caffe2(model, weights):
        line = write_predictor(read_predictor(model, weights, shapes), arguments.output)
    else:
        stages = arguments.stage
        with closing(open_for_inference(model, (weights,), shapes, stages=stages)) as net:
            line = write_net(net, arguments.output)
    print(f"Exported {arguments.model} to {arguments.output}: {line}.")
    return 0


LOGGER = logging.getLogger(__name__)


def run_import(arguments: argparse.Namespace) -> int:
    """Write the model, and print how many tensors it has; 0 when it is written."""
    definition = read_net(arguments.model)
    definition = filter_phase(definition, definition.state(TEST))
    definition = inference_definition(definition, dict(arguments.input))
    taken, unused = import_weights(
        definition, read_tensors(arguments.weights), dict(arguments.name), arguments.output
    )
    if unused:
        LOGGER.warning(
            "%s of %s not used: %s",
            counted(len(unused), "tensor"),
            arguments.weights,
            ", ".join(unused),
        )
    print(f"Imported {counted(taken, 'tensor')} of {arguments.weights} to {arguments.output}.")
    return 0


VECTOR_FORMATS = ("svg", "pdf", "ps", "eps")
DPI = 150
"""The resolution of other formats."""


def run_draw_net(arguments: argparse.Namespace) -> int:
    """Draw and say where; 0 when it is written."""
    definition = read_net(arguments.input_net)
    extension = extension_of(arguments.output_file)
    if arguments.phase == "ALL":
        if arguments.shapes:
            raise UsageError(
                "--shapes needs --phase=TRAIN or TEST: blobs of two phases may have different "
                "shapes"
            )
        graph = get_pydot_graph(
            definition.param, arguments.rankdir or "LR", display_lrm=arguments.display_lrm
        )
    else:
        graph = _phase_graph(definition, arguments)
    if extension not in VECTOR_FORMATS:
        graph.set("dpi", DPI)
    write_atomically(arguments.output_file, render(graph, extension))
    print(f"Drew {definition.param.name or arguments.input_net} into {arguments.output_file}.")
    return 0


def _phase_graph(definition: NetDefinition, arguments: argparse.Namespace) -> pydot.Dot:
    state = definition.state(arguments.phase)
    shapes: dict[str, Shape] | None = None
    if arguments.shapes:
        context = LayerContext(phase=state.phase, seed=0)
        check = checked_layers(definition, context, state=state, leave_out=runs_users_code)
        with check as checked:
            shapes = checked.shapes
    return picture_graph(
        filter_net(definition, state).param.layer,
        rankdir=arguments.rankdir or "TB",
        display_lrm=arguments.display_lrm,
        shapes=shapes,
    )


def run_consolidate(arguments: argparse.Namespace) -> int:
    """Write one file of the parts of a checkpoint; 0 when it is written."""
    tensors = consolidate(arguments.parts, arguments.output)
    print(f"Wrote {counted(tensors, 'tensor')} to {arguments.output}.")
    return 0


def run_classify(arguments: argparse.Namespace) -> int:
    """Print the classes of each picture; 0 when all of them have been."""
    prepare_process()
    mean, labels, pictures = arguments.mean, arguments.labels, arguments.pictures
    if len(pictures) == 3 and pictures[0].suffix == ".binaryproto":  # as Caffe's tool takes them
        mean, labels, *pictures = pictures
    names = _labels(labels) if labels is not None else ()
    request = NetRequest(
        model=arguments.net,
        weights=(arguments.model,),
        phase=TEST,
        device=one_device(arguments.gpu),
    )
    with closing(open_net(request)) as net:
        scores = PictureScores(
            net,
            mean=mean,
            scale=arguments.scale,
            size=arguments.images_dim,
            rgb=arguments.rgb,
        )
        for path in pictures:
            found = scores.of(path)
            if names and len(names) != len(found):
                raise DataError(
                    f"{labels} has {len(names)} labels, but the net returns {len(found)} scores; "
                    "expected a line for each"
                )
            print(f"---------- Prediction for {path} ----------")
            for place in (-found).argsort(kind="stable")[: arguments.top].tolist():
                print(f"{found[place]:.4f} - " + (f'"{names[place]}"' if names else str(place)))
    return 0


def _labels(path: Path) -> Sequence[str]:
    try:
        text = text_of(read_definition(path))
    except OSError as error:
        raise DataError(f"cannot read the labels {path}: {error.strerror}") from error
    if text is None:
        raise DataError(f"{path} is not text; expected a line with the name of each class")
    return text.splitlines()
