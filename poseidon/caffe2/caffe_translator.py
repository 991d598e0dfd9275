"""Trained nets of Caffe as nets of Caffe2.

    python -m poseidon.caffe2.caffe_translator deploy.prototxt net.caffemodel

writes `init_net.pb`, which makes the parameters, and `predict_net.pb`, which computes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.base.text_files import visible_line
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe2 import core
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, TensorProtos
from poseidon.caffe2.runtime.chains import first_reads, unread
from poseidon.caffe2.translation import layers as _layers  # noqa: F401 - registers translators
from poseidon.caffe2.translation.registry import (
    AddArgument,
    BaseTranslate,
    TranslatorRegistry,
    translate,
)
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import PoseidonError

__all__ = [
    "AddArgument",
    "BaseTranslate",
    "ConvertTensorProtosToInitNet",
    "TranslateModel",
    "TranslatorRegistry",
]

TranslateModel = TranslatorRegistry.TranslateModel


def ConvertTensorProtosToInitNet(net_params: TensorProtos, *input_names: str) -> NetDef:
    """Return the net that makes the parameters, and a small tensor for each input to exist.

    Args:
        net_params: parameters of float32, from `TranslateModel`.
        input_names: the inputs of the net.
    """
    init_net = NetDef()
    for tensor in net_params.protos:
        op = core.CreateOperator("GivenTensorFill", [], [tensor.name], shape=list(tensor.dims))
        op.arg.add(name="values").floats.MergeFrom(tensor.float_data)
        init_net.op.append(op)
    for name in input_names:
        init_net.op.append(core.CreateOperator("ConstantFill", [], [name], shape=[1]))
    return init_net


def name_ends(net: NetDef, params: TensorProtos) -> list[str]:
    """Set the external inputs and outputs of a net: what it reads and does not make, its
    parameters, and what it makes and does not read. Return the inputs without the parameters.
    """
    parameters = [tensor.name for tensor in params.protos]
    inputs = first_reads(net.op, known=parameters)
    net.external_input.extend([*inputs, *parameters])
    net.external_output.extend(name for name in unread(net.op) if not name.startswith("_"))
    return inputs


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate files; return the exit code."""
    parser = argparse.ArgumentParser(description="Translate a trained net of Caffe to Caffe2")
    parser.add_argument("prototext", help="the definition of the net for inference")
    parser.add_argument("caffemodel", help="the trained model, also .caffemodel.h5")
    parser.add_argument("--init_net", default="init_net.pb", help="the net of the parameters")
    parser.add_argument("--predict_net", default="predict_net.pb", help="the net that computes")
    parser.add_argument(
        "--remove_legacy_pad",
        action="store_true",
        help="give poolings the padding of this input's shape in place of Caffe's rounding",
    )
    parser.add_argument(
        "--input_dims", type=int, nargs="+", help="shape of the first input, such as 1 3 227 227"
    )
    given = parser.parse_args(arguments)
    try:
        net, params = translate(
            read_net(given.prototext),
            read_model(Path(given.caffemodel)),
            is_test=True,
            net_state=None,
            remove_legacy_pad=given.remove_legacy_pad,
            input_dims=given.input_dims,
        )
        inputs = name_ends(net, params)
        init_net = ConvertTensorProtosToInitNet(params, *inputs)
        write_atomically(Path(given.init_net), init_net.SerializeToString())
        write_atomically(Path(given.predict_net), net.SerializeToString())
        write_atomically(Path(f"{given.predict_net}txt"), str(net).encode())
    except PoseidonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sentence = (
        f"Wrote {given.predict_net}, from {', '.join(inputs)} to {', '.join(net.external_output)}, "
        f"and {given.init_net}, {len(params.protos)} parameters."
    )
    print(visible_line(sentence))
    return 0


if __name__ == "__main__":
    sys.exit(main())
