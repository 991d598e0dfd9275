"""Predictors of training nets with recurrent layers."""

from __future__ import annotations

from poseidon.caffe2 import core, rnn_cell
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.predictor.predictor_py_utils import ExtractPredictorNet
from poseidon.caffe2.proto import caffe2_pb2


def test_the_steps_of_a_recurrent_layer_move_and_lose_their_gradient() -> None:
    model = ModelHelper(name="recurrent")
    output, *_ = rnn_cell.LSTM(
        model=model,
        input_blob="input",
        seq_lengths="lengths",
        initial_states=("hidden", "cell"),
        dim_in=3,
        dim_out=2,
        scope="layer",
        return_last_layer_only=True,
    )
    device = core.DeviceOption(caffe2_pb2.CPU, 1)
    net, _ = ExtractPredictorNet(model.net.Proto(), ["input"], [output], device)
    (op,) = [op for op in net.Proto().op if op.type == "RecurrentNetwork"]
    arguments = {argument.name: argument for argument in op.arg}
    assert {inner.device_option.device_id for inner in arguments["step_net"].n.op} == {1}
    assert arguments["backward_step_net"].n == caffe2_pb2.NetDef()
