"""The commands that read a net, a model or a log: test, time, device_query,
draw_net, plot, and those that upgrade files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from poseidon.cli.parsers.form import Command, FlagGroup, Parser, flag, switch, word
from poseidon.exchange.compute_options import ComputeOptions
from poseidon.flags.flag import IMPORT, ON_TERMINAL, Opens, Takes, flags_of, progress
from poseidon.flags.values import (
    count,
    extents,
    input_shape,
    mean,
    natural,
    number,
    parts,
    paths,
    renamed,
    whole,
)

PHASES = ("TRAIN", "TEST")
RANKDIRS = ("LR", "TB", "BT", "RL")
AXES = ("iterations", "seconds")
SCALES = ("auto", "linear", "log")
CHARTS = tuple("01234567")


def _init(parser: Parser) -> None:
    word(parser, "project", "cifar10, lenet (or mnist), resnet, ...", takes=Takes.OPTIONAL_WORD)
    text = "a new or empty folder; default: PROJECT"
    word(parser, "folder", text, takes=Takes.OPTIONAL_WORD, read=Path, metavar="DIR")
    switch(parser.section("Flags"), "list", "list the projects")


def _score(parser: Parser, phase: str) -> None:
    group = parser.section("What to run")
    text = "the net definition (prototxt)"
    flag(group, "model", text, metavar="FILE", required=True, opens=Opens.FILE)
    text = "models, binary or HDF5, with commas; later ones win"
    flag(group, "weights", text, metavar="FILES", read=paths, default=(), opens=Opens.MODEL)
    flag(group, "iterations", "batches (50)", read=whole, default=50, metavar="N")
    flag(group, "gpu", "the GPU; default: CPU", metavar="ID", default="")
    text = f"of the net: TRAIN or TEST ({phase})"
    flag(group, "phase", text, choices=PHASES, default=phase, metavar="PHASE")
    flag(
        group, "level", "level for include rules of the net (0)", read=whole, default=0, metavar="L"
    )
    _stage_flag(group)
    group.add(*flags_of(ComputeOptions))
    group.add(IMPORT)
    group.add(progress(ON_TERMINAL))


def _device_query(parser: Parser) -> None:
    flag(
        parser.section("Flags"), "gpu", "which: 0,1 or all (default)", metavar="IDS", default="all"
    )


def _draw_net(parser: Parser) -> None:
    word(parser, "input_net", "net definition of any grammar", read=Path, opens=Opens.FILE)
    word(parser, "output_file", "the picture: .png, .svg or .pdf", read=Path)
    group = parser.section("Flags")
    text = "where the data flows: TB (default; of ALL: LR), LR, BT, RL"
    flag(group, "rankdir", text, choices=RANKDIRS, default=None, metavar="DIR")
    text = "whose layers: TRAIN (default), TEST or ALL"
    flag(group, "phase", text, choices=(*PHASES, "ALL"), default="TRAIN", metavar="PHASE")
    switch(group, "shapes", "show the blobs' shapes; reads data")
    switch(group, "display_lrm", "show each layer's learning rate multipliers")


def _stage_flag(group: FlagGroup) -> None:
    text = "stages for include rules of the net, with commas"
    flag(group, "stage", text, read=parts, default=(), metavar="NAMES")


def _shapes_flag(group: FlagGroup) -> None:
    text = "shape of a blob that a data layer reads"
    flag(
        group,
        "input",
        text,
        takes=Takes.VALUES,
        default=(),
        metavar="NAME:N,C,H,W",
        read=input_shape,
    )


def _deploy(parser: Parser) -> None:
    text = "a net that trains: with data layers and losses"
    word(parser, "net", text, read=Path, opens=Opens.FILE)
    text = "the file to write (beside it, *deploy.prototxt)"
    word(parser, "output", text, read=Path, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    flag(group, "batch", "images of a pass (1)", read=natural, default=1, metavar="N")
    _shapes_flag(group)
    _stage_flag(group)
    group.add(IMPORT)


def _classify(parser: Parser) -> None:
    word(parser, "net", "a deploy net; `poseidon deploy` makes one", read=Path, opens=Opens.FILE)
    word(parser, "model", "its model, binary or HDF5", read=Path, opens=Opens.MODEL)
    text = "files; or mean file, labels and picture, as Caffe's tool"
    word(
        parser,
        "pictures",
        text,
        metavar="PICTURE",
        read=Path,
        takes=Takes.WORDS,
        opens=Opens.FILE,
    )
    group = parser.section("Flags")
    flag(group, "mean", "a mean file, or values: one, or B,G,R", read=mean, metavar="FILE|VALUES")
    flag(group, "scale", "of pixels, after the mean (1)", read=number, default=1.0, metavar="S")
    text = "size before the crop (the mean file's, else the net's)"
    flag(group, "images_dim", text, read=extents, metavar="H,W")
    switch(group, "rgb", "R,G,B, as databases of CIFAR-10 (B,G,R)")
    text = "the names of the classes, a line each"
    flag(group, "labels", text, read=Path, metavar="FILE", opens=Opens.FILE)
    flag(group, "top", "classes to print (5)", read=natural, default=5, metavar="N")
    flag(group, "gpu", "the GPU; default: CPU", metavar="ID", default="")


def _export(parser: Parser) -> None:
    text = "the net definition, whose phase TEST is exported, or Caffe2's predict_net.pb or predictor database"
    word(parser, "model", text, metavar="NET", read=Path, opens=Opens.NET)
    text = "the model, binary or HDF5, Caffe2's init_net.pb, or a checkpoint; none for a predictor or a checkpoint alone"
    word(
        parser,
        "weights",
        text,
        takes=Takes.OPTIONAL_WORD,
        metavar="MODEL",
        read=Path,
        opens=Opens.MODEL,
    )
    word(parser, "output", "the file: .onnx, .safetensors, .pth or .pt2", read=Path)
    group = parser.section("Flags")
    _shapes_flag(group)
    _stage_flag(group)
    group.add(IMPORT)


def _import(parser: Parser) -> None:
    word(parser, "model", "the net definition", metavar="NET", read=Path, opens=Opens.FILE)
    word(parser, "weights", "tensors by name: .pth or .safetensors", read=Path, opens=Opens.FILE)
    word(parser, "output", "the model to write (.caffemodel)", read=Path)
    group = parser.section("Flags")
    text = "a tensor of the net, and its name in the file"
    flag(group, "name", text, takes=Takes.VALUES, default=(), metavar="OURS=THEIRS", read=renamed)
    _shapes_flag(group)
    group.add(IMPORT)


def _download_model_binary(parser: Parser) -> None:
    text = "a model's folder, with a readme.md"
    word(parser, "dirname", text, metavar="FOLDER", read=Path, opens=Opens.FOLDER)
    parser.section("Flags").add(progress())


def _parse_log(parser: Parser) -> None:
    text = "a log, or a job's id or folder; default: the newest job of the current folder"
    word(parser, "logfile_path", text, metavar="LOG|JOB", takes=Takes.OPTIONAL_WORD)
    word(parser, "output_dir", "default: the log's folder", read=Path, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    flag(group, "delimiter", "between columns (,)", default=",", metavar="CHAR")
    switch(group, "verbose", "also name a table that is not written, as it has no rows")


def _plot(parser: Parser) -> None:
    text = "logs, or jobs by id or folder; default: the last job"
    word(parser, "logs", text, metavar="LOG|JOB", takes=Takes.WORDS, opens=Opens.LOG)
    group = parser.section(
        "Flags",
        "Charts, by Caffe's numbers: 0 accuracy over iterations, 1 over seconds; 2 test loss over "
        "iterations, 3 over seconds; 4 learning rate over iterations, 5 over seconds; 6 train loss "
        "over iterations, 7 over seconds.",
    )
    text = "PNG, SVG or PDF, by its ending"
    flag(group, "output", text, metavar="FILE", read=Path, required=True, aliases=("o",))
    text = "axis: iterations (default) or seconds"
    flag(group, "x", text, choices=AXES, default="iterations", metavar="AXIS")
    flag(group, "chart", "one chart; default: loss and accuracy", choices=CHARTS, metavar="N")
    text = "points of the moving average; 1: none (1/40 of a train curve)"
    flag(group, "smooth", text, read=count, metavar="N")
    text = "of losses and rates: auto (log where it helps), linear, log"
    flag(group, "scale", text, choices=SCALES, default="auto", metavar="SCALE")


def _upgrade(parser: Parser, what: str) -> None:
    word(parser, "input", f"file of any grammar: {what}", read=Path, opens=Opens.FILE)
    word(parser, "output", "file to write in today's grammar", read=Path)


def _upgrade_command(name: str, what: str, example: str) -> Command:
    line = f"upgrade {what} to today's grammar"
    return Command(
        name=name,
        module="definitions",
        line=line,
        description=f"{line.capitalize()}. OUTPUT is written even if nothing changes.",
        example=f"poseidon {name} {example}",
        declare=partial(_upgrade, what=what),
    )


def _consolidate(parser: Parser) -> None:
    word(parser, "parts", "folder of torch.distributed.checkpoint", read=Path, opens=Opens.FOLDER)
    word(parser, "output", "file to write, for torch.load", read=Path)


INIT = Command(
    name="init",
    module="definitions",
    line="make a project folder to edit and train",
    description="Copy a net of the zoo, or an example, into a new folder that trains from there: "
    "solver, net or script, machinefile, README. Without PROJECT list what there is.",
    example="poseidon init cifar10 mine",
    declare=_init,
)
COMMANDS: Sequence[Command] = (
    Command(
        name="test",
        module="nets",
        line="score a trained net, as caffe test",
        description="Run a net in phase TEST over its own data, and print each batch's outputs "
        "and their means.",
        example="poseidon test -model net.prototxt -weights net.caffemodel -iterations 100",
        declare=partial(_score, phase="TEST"),
    ),
    Command(
        name="time",
        module="nets",
        line="measure a net layer by layer, as caffe time",
        description="Run a net forward and backward, and print the mean milliseconds of each "
        "layer.",
        example="poseidon time -model net.prototxt -iterations 10",
        declare=partial(_score, phase="TRAIN"),
    ),
    Command(
        name="device_query",
        module="nets",
        line="show this machine's GPUs",
        description="Print the properties of this machine's GPUs, as caffe device_query does.",
        example="poseidon device_query -gpu=all",
        declare=_device_query,
    ),
    Command(
        name="draw_net",
        module="models",
        line="draw a net as PNG, SVG, HTML or PDF",
        description="Draw the layers and blobs of a net definition. A browser zooms and moves an "
        "SVG or HTML file, by mouse, fingers or keys. Needs Graphviz's program dot.",
        example="poseidon draw_net net.prototxt net.png",
        declare=_draw_net,
    ),
    Command(
        name="deploy",
        module="models",
        line="write the deploy net of a net that trains",
        description="Write the phase TEST of a net for use: its data comes from the caller, a "
        "softmax loss becomes its scores, and other losses and accuracies are left out. The shape "
        "of the data is the crop's, the database's or --input's.",
        example="poseidon deploy train_val.prototxt deploy.prototxt",
        declare=_deploy,
    ),
    Command(
        name="classify",
        module="models",
        line="print the likeliest classes of pictures",
        description="Print the best scores of pictures, as Caffe's classification.bin does. A "
        "picture is resized, the mean subtracted and the center cropped, as a data layer of the "
        "phase TEST does it.",
        example="poseidon classify deploy.prototxt net.caffemodel cat.jpg --mean=104,117,123\n"
        "poseidon classify deploy.prototxt net.caffemodel mean.binaryproto names a.jpg",
        declare=_classify,
    ),
    Command(
        name="export",
        module="models",
        line="write a trained net as ONNX, safetensors or torch",
        description="Write what a net of Caffe, Caffe2 or torch computes (ONNX, .pt2), or its "
        "weights by name (.safetensors, .pth). Layers that need labels are left out.",
        example="poseidon export deploy.prototxt net.caffemodel net.onnx",
        declare=_export,
    ),
    Command(
        name="import",
        module="models",
        line="make a .caffemodel of torch weights",
        description="Write a model with the tensors <layer>.<blob> of a file of torch or "
        "safetensors.",
        example="poseidon import deploy.prototxt weights.pth net.caffemodel",
        declare=_import,
    ),
    Command(
        name="consolidate",
        module="models",
        line="make one file of a checkpoint in parts",
        description="Write the whole tensors of a checkpoint of torch.distributed.checkpoint, whose "
        "parts the workers have written. It needs no GPU, but memory for all of them. The parts' "
        "index is a pickle, which can run code: use only folders that you trust.",
        example="poseidon consolidate parts_1000 whole.pt",
        declare=_consolidate,
    ),
    Command(
        name="parse_log",
        module="records",
        line="make tables (CSV) of a training log",
        description="Write <OUTPUT_DIR>/<log>.train and <log>.test, tables of a log of Caffe or "
        "of poseidon train.",
        example="poseidon parse_log output/<job>/worker_0.log",
        declare=_parse_log,
    ),
    Command(
        name="plot",
        module="plot",
        line="draw losses and scores of training logs",
        description="Draw losses and scores of logs of Caffe or of poseidon train, all in one "
        "picture.",
        example="poseidon plot output/<job>/worker_0.log -o curves.png",
        declare=_plot,
    ),
    Command(
        name="download_model_binary",
        module="definitions",
        line="fetch the weights of a model's folder",
        description="Fetch the model that a folder's readme names (caffemodel, caffemodel_url, "
        "sha1).",
        example="poseidon download_model_binary models/bvlc_reference_caffenet",
        declare=_download_model_binary,
    ),
    _upgrade_command("upgrade_net_proto_text", "a net in text", "old.prototxt new.prototxt"),
    _upgrade_command(
        "upgrade_net_proto_binary", "a model in binary", "old.caffemodel new.caffemodel"
    ),
    _upgrade_command("upgrade_solver_proto_text", "a solver in text", "old.prototxt new.prototxt"),
)
