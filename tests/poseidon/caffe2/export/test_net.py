"""ONNX models of Caffe2 nets: operators as Caffe2 recorded them, whole nets, refusals; ONNX
Runtime gives the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format

from poseidon.caffe.export.graph import OPERATORS, Exported
from poseidon.caffe2 import core
from poseidon.caffe2.export.files import Predictor
from poseidon.caffe2.export.net import PredictorModule, export_predictor, traced
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.errors import DefinitionError
from tests.support.caffe2_nets import SMALL, built, inputs_of, results
from tests.support.needs import SHARED

OPS = SHARED / "caffe2" / "golden" / "ops"


def ran(exported: Exported, given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(exported.model.SerializeToString(), options)
    read = {each.name: given[each.name] for each in session.get_inputs()}
    found: list[np.ndarray] = session.run([blob.name for blob in exported.outputs], read)
    return found


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the larger of 1 and the values."""
    assert found.shape == wanted.shape
    if not wanted.size:
        return 0.0
    return float(np.abs(found - wanted.astype(np.float64)).max() / max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("name", SMALL)
def test_a_net_computes_the_same_in_onnx(name: str) -> None:
    predictor = built(name)
    exported = export_predictor(predictor)
    for batch in (None,) if exported.fixed else (None, 3):
        given = inputs_of(predictor, batch)
        for found, wanted in zip(ran(exported, given), results(predictor, given), strict=True):
            assert difference(found, wanted) < 1e-4


def test_the_traced_module_computes_the_same() -> None:
    for name in ("lenet in NHWC", "LSTM over words", "embedding bag"):
        predictor = built(name)
        given = inputs_of(predictor)
        module = PredictorModule(traced(predictor)[0])
        found = module(*(torch.from_numpy(value) for value in given.values()))
        for one, other in zip(found, results(predictor, given), strict=True):
            assert difference(one.numpy(), other) < 1e-6


WITHOUT = """
batchonehot depthsplit expand fill_range fill_range_start fill_range_step lengthsmax
lengthsrangefill lengthstile lengthstoranges lengthstosegmentids lengthsweightedsum makeTwoClass
packsegments reducebackmean_lengths reducefrontsum_lengths reshape_input scatterassign
scatterweightedsum segmentidstolengths slice_inputs sortedsegmentmean sortedsegmentrangemean
sortedsegmentrangesum sortedsegmentsum sparsetodense spatialbn_2d spatialbn_nhwc spatialbn_train
spatialbn_train_default split_input sumreducelike tile_inputs topk_flat unique unpacksegments
unsortedsegmentsum weightedsum weightedsum_gradient weightedsum_inplace
"""
"""Recorded operators whose form depends on data, or that train."""
LOSSES = """
accuracy multiclassaccuracy crossentropy labelcrossentropy softmaxwithloss two_losses
spatialsoftmaxwithloss softmax_xent sigmoidcrossentropy weightedsigmoid marginranking
pairwiseloss perplexity enforcefinite
"""


def recorded() -> list[str]:
    names = sorted(path.stem for path in OPS.glob("*.npz"))
    without, losses = WITHOUT.split(), tuple(LOSSES.split())
    return [name for name in names if name not in without and not name.startswith(losses)]


def case(name: str) -> tuple[NetDef, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The forward operators of a recorded case, its inputs, and the outputs that Caffe2 gave."""
    net = text_format.Parse((OPS / f"{name}.case.pbtxt").read_text(), NetDef())
    forward = [op for op in net.op if not op.is_gradient_op]
    net.ClearField("op")
    net.op.extend(forward)
    with np.load(OPS / f"{name}.npz", allow_pickle=True) as arrays:
        kept = {key: arrays[key] for key in arrays.files if arrays[key].dtype.kind not in "USO"}
    inputs = {key[3:]: value for key, value in kept.items() if key.startswith("in:")}
    outputs = {key[4:]: value for key, value in kept.items() if key.startswith("out:")}
    first = {op.output[0] for op in forward if op.type in ("LRN", "InstanceNorm", "GroupNorm")}
    second = {
        name
        for op in forward
        for name in op.output[1:]
        if first & set(op.output) or op.type == "Concat"
    }
    return net, inputs, {key: value for key, value in outputs.items() if key not in second}


@pytest.mark.thorough
@pytest.mark.needs("data")
def test_operators_give_what_caffe2_gave() -> None:
    """Every recorded operator of inference, with its other inputs as parameters."""
    count = 0
    for name in recorded():
        net, given, wanted = case(name)
        first, *rest = given or [""]
        if not given or not wanted:
            continue
        predictor = Predictor(
            net=net,
            parameters={each: torch.from_numpy(np.array(given[each])) for each in rest},
            inputs={first: (given[first].shape, str(given[first].dtype))},
            outputs=tuple(wanted),
        )
        for found, value in zip(
            ran(export_predictor(predictor), given), wanted.values(), strict=True
        ):
            assert difference(found, value) < 1e-5, name
        count += 1
    assert count > 250


def test_every_form_belongs_to_an_operator() -> None:
    from poseidon.caffe2.operators.registry import registered

    assert set(OPERATORS) <= set(registered())


def predictor_of(net: core.Net, outputs: list[str], **inputs: tuple[int, ...]) -> Predictor:
    return Predictor(
        net=net.Proto(),
        parameters={"w": torch.ones(3, 4), "b": torch.zeros(3)},
        inputs={name: (shape, "float32") for name, shape in inputs.items()},
        outputs=tuple(outputs),
    )


def test_operators_without_a_form_are_named_all_at_once() -> None:
    net = core.Net("odd")
    net.Unique("x", "u")
    net.UniformFill([], "noise", shape=[3])
    net.Add([net.Relu("x", "r"), "noise"], "sum")
    with pytest.raises(DefinitionError, match=rf"of the net '{net.Name()}': Unique \(u\)"):
        export_predictor(predictor_of(net, ["u", "sum"], x=(3,)))
    trained = core.Net("trained")
    trained.Dropout("x", ["d", "mask"], ratio=0.5)
    trained.TopK("x", ["v", "i"], k=5)
    with pytest.raises(DefinitionError, match=r"Dropout \(d\) draws at random: set is_test"):
        export_predictor(predictor_of(trained, ["d", "v"], x=(2, 3)))


def test_what_needs_labels_is_left_out() -> None:
    net = core.Net("labelled")
    net.FC(["x", "w", "b"], "scores")
    net.SoftmaxWithLoss(["scores", "label"], ["softmax", "loss"])
    net.Accuracy(["softmax", "label"], "accuracy")
    exported = export_predictor(predictor_of(net, ["softmax", "loss", "accuracy"], x=(2, 4)))
    assert [blob.name for blob in exported.outputs] == ["softmax"]
    assert exported.summary().endswith(
        "outputs: softmax Nx3; left out: loss, accuracy (they need inputs without --input)"
    )
    assert ran(exported, {"x": np.ones((5, 4), np.float32)})[0].shape == (5, 3)


def test_a_batch_that_cannot_change_is_explained() -> None:
    net = core.Net("moved")
    net.Transpose("x", "y", axes=[1, 0])
    exported = export_predictor(predictor_of(net, ["y"], x=(2, 4)))
    assert exported.fixed == "an operator moves the batch to a different axis"
    net = core.Net("shaped")
    net.Reshape("x", ["y", "old"], shape=[2, 2, 2])
    assert (
        export_predictor(predictor_of(net, ["y"], x=(2, 4))).fixed
        == "its operators allow a batch of 2 only"
    )


def test_an_input_a_parameter_and_a_constant_may_be_outputs() -> None:
    net = core.Net("passed")
    net.ConstantFill([], "c", shape=[2], value=3.0)
    net.Relu("x", "x")
    exported = export_predictor(predictor_of(net, ["x", "w", "c"], x=(2, 4)))
    x, w, c = ran(exported, {"x": -np.ones((2, 4), np.float32)})
    assert json.dumps([x.max().item(), w.sum().item(), c.tolist()]) == "[0.0, 12.0, [3.0, 3.0]]"
