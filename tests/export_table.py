"""ONNX models of whole nets beside ours: python -m tests.export_table [--corpus | --caffe2]
[--out FILE] [PART ...]

Every deploy definition of the zoo, every net of the corpus of real definitions, or nets of Caffe2,
with random weights and statistics. PART: only files whose path, or nets whose name, has one of
these in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from poseidon.caffe.export.graph import OPSET, Exported
from poseidon.caffe.export.net import export_net, inference_definition
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net, filter_phase
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, NetState
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe2.export.net import export_predictor
from poseidon.errors import PoseidonError
from tests.corpus.random_inputs import random_inputs, with_random_inputs
from tests.support.caffe2_nets import NETS, built, inputs_of, results
from tests.support.needs import SHARED
from tests.support.own_process import in_own_process

Arrays = Mapping[str, np.ndarray]
ROOT = Path(__file__).parents[1]
ZOO = ("deploy", "lenet.prototxt", "cifar10_quick.prototxt", "cifar10_full.prototxt")
SECONDS = 600.0
HEAD = """# Nets in ONNX

`python -m tests.export_table` generates this table; with `--corpus` the table of the corpus, with
`--caffe2` the table of Caffe2's nets. Each net has random weights and statistics. The difference is
the largest of any output, through ONNX Runtime on the CPU, relative to the larger of 1 and the
largest value of that output.

| net | opset | batch | nodes | difference |
|---|---|---|---|---|
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.export_table", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--corpus", action="store_true", help="the corpus in place of the zoo")
    parser.add_argument("--caffe2", action="store_true", help="nets of Caffe2 in place of the zoo")
    parser.add_argument("--out", type=Path, help="the report; default: the terminal")
    arguments = parser.parse_args()
    root = SHARED / "data" / "prototxt-corpus" if arguments.corpus else ROOT / "prototxt"
    work, nets = (
        (_caffe2_cells, {n: n for n in NETS}) if arguments.caffe2 else (_cells, _files(root))
    )
    lines = []
    for name, argument in nets.items():
        if not arguments.parts or any(part in name for part in arguments.parts):
            cells = in_own_process(
                work, argument, seconds=SECONDS, otherwise=_absent, method="spawn"
            )
            lines.append(f"| {name} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    report = HEAD + "\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(report, encoding="utf-8")
    else:
        print(report)
    return 0


def _files(root: Path) -> dict[str, Path]:
    """Return the definitions of nets below a folder by name; of the zoo those for deployment."""
    found = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.prototxt"))}
    zoo = root == ROOT / "prototxt"
    return {
        name: path
        for name, path in found.items()
        if "solver" not in name and (not zoo or any(part in path.name for part in ZOO))
    }


def _caffe2_cells(name: str) -> str:
    """Return the cells of one net of Caffe2."""
    torch.set_num_threads(1)
    predictor = built(name)
    given = inputs_of(predictor)
    wanted = results(predictor, given)
    exported = export_predictor(predictor)
    found = _ran(exported, [blob.name for blob in exported.outputs], given)
    return _row(exported, dict(zip(predictor.outputs, wanted, strict=True)), found)


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
    found = _ran(exported, list(wanted), {name: x.numpy() for name, x in given.items()})
    return _row(exported, {name: value.detach().numpy() for name, value in wanted.items()}, found)


def _ran(exported: Exported, outputs: list[str], given: Arrays) -> list[np.ndarray]:
    """Return what ONNX Runtime computes on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(exported.model.SerializeToString(), options)
    read = {each.name: given[each.name] for each in session.get_inputs()}
    found: list[np.ndarray] = session.run(outputs, read)
    return found


def _row(exported: Exported, wanted: Arrays, found: list[np.ndarray]) -> str:
    """Return the cells of a net: opset, batch, nodes and the largest difference."""
    worst = 0.0
    for (name, ours), theirs in zip(wanted.items(), found, strict=True):
        if ours.shape != theirs.shape:
            return f"{OPSET} | - | - | {name}: {ours.shape} here, {theirs.shape} there"
        if theirs.size:
            difference = np.abs(ours - theirs).max() / max(1.0, np.abs(ours).max())
            worst = max(worst, float(difference))
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
