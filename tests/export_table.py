"""ONNX models of whole nets beside ours: python -m tests.export_table [--corpus] [--out FILE] [PART ...]

Every deploy definition of the zoo, or every net of the corpus of real definitions, with random weights and statistics.
PART: only files whose path has one of these in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from poseidon.errors import PoseidonError
from poseidon.export.graph import OPSET
from poseidon.export.net import export_net, inference_definition
from poseidon.layers.base import LayerContext
from poseidon.net.compile import compile_net, filter_phase
from poseidon.net.net import Net
from poseidon.proto.caffe_pb2 import TEST, NetState
from poseidon.proto.definition import read_net
from tests.corpus.random_inputs import random_inputs, with_random_inputs
from tests.support.needs import SHARED
from tests.support.own_process import in_own_process

ROOT = Path(__file__).parents[1]
ZOO = ("deploy", "lenet.prototxt", "cifar10_quick.prototxt", "cifar10_full.prototxt")
SECONDS = 600.0
HEAD = """# Nets in ONNX

`python -m tests.export_table` generates this table, with `--corpus` that of the corpus. Each net
has random weights and statistics. The difference is the largest of any output, through ONNX Runtime
on the CPU, relative to the larger of 1 and the largest value of that output.

| net | opset | batch | nodes | difference |
|---|---|---|---|---|
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.export_table", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--corpus", action="store_true", help="the corpus in place of the zoo")
    parser.add_argument("--out", type=Path, help="the report; default: the terminal")
    arguments = parser.parse_args()
    root = SHARED / "data" / "prototxt-corpus" if arguments.corpus else ROOT / "prototxt"
    lines = []
    for path in sorted(root.rglob("*.prototxt")):
        name = str(path.relative_to(root))
        wanted = arguments.corpus or any(part in path.name for part in ZOO)
        if (
            wanted
            and "solver" not in name
            and (not arguments.parts or any(p in name for p in arguments.parts))
        ):
            cells = in_own_process(_cells, path, seconds=SECONDS, otherwise=_absent, method="spawn")
            lines.append(f"| {name} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    report = HEAD + "\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(report, encoding="utf-8")
    else:
        print(report)
    return 0


def _cells(path: Path) -> str:
    """Return the cells of one net."""
    torch.set_num_threads(1)
    try:
        return _compared(path)
    except PoseidonError as error:
        return _absent(str(error).removeprefix(f"{path}:").strip())


def _absent(why: str) -> str:
    return f"- | - | - | {why}"


def _compared(path: Path) -> str:
    import onnxruntime

    whole = read_net(path)
    stages = {stage for each in whole.param.layer for rule in each.include for stage in rule.stage}
    state = NetState(phase=TEST, stage=sorted(stages)[:1])
    definition, _ = with_random_inputs(filter_phase(whole, state))
    definition = inference_definition(definition, {})
    net = _randomized(compile_net(definition, LayerContext(phase=TEST, seed=1), state=state))
    exported = export_net(net)
    given = random_inputs(net)
    with torch.no_grad():
        wanted = net(given)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(exported.model.SerializeToString(), options)
    read = {each.name for each in session.get_inputs()}
    found = session.run(list(wanted), {name: x.numpy() for name, x in given.items() if name in read})
    worst = 0.0
    for (name, ours), theirs in zip(wanted.items(), found, strict=True):
        if tuple(ours.shape) != theirs.shape:
            return f"{OPSET} | - | - | {name}: {tuple(ours.shape)} here, {theirs.shape} there"
        if theirs.size:
            difference = np.abs(ours.detach().numpy() - theirs).max()
            worst = max(worst, float(difference / max(1.0, float(ours.detach().abs().max()))))
    batch = f"fixed: {exported.fixed}" if exported.fixed else "dynamic"
    return f"{OPSET} | {batch} | {len(exported.model.graph.node)} | {worst:.1e}"


def _randomized(net: Net) -> Net:
    """Give blobs that a filler leaves at zero, and statistics, random values."""
    generator = torch.Generator().manual_seed(1)
    for blob, parameter in net.named_parameters():
        last = blob.rpartition(".")[2]
        if last in ("variance", "factor"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif not bool(parameter.any()):
            parameter.data.normal_(0, 0.05, generator=generator)
    return net


if __name__ == "__main__":
    raise SystemExit(main())
