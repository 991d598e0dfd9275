"""One token as the value of one setting: legal exactly when protobuf takes it."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.proto.values import listing, problem, quoted

# A setting of each kind of value.
SETTINGS = {
    "int32": "LayerParameter.accuracy_param.axis",
    "uint32": "LayerParameter.accuracy_param.top_k",
    "int64": "SolverParameter.random_seed",
    "float": "SolverParameter.base_lr",
    "bool": "SolverParameter.debug_info",
    "string": "SolverParameter.net",
    "enum": "SolverParameter.solver_mode",
}
TOKENS = r"""
0 1 -1 +1 007 0x1F 1.5 -.5 1e3 1e-8f 4294967295 4294967296 9223372036854775808 inf -inf nan abc
true True t false CPU GPU cpu 2 "0" '1' "abc" "CPU" " "open "\n" "\xff" "é" { [ :
"""


def setting(kind: str) -> FieldDescriptor:
    root, *names = SETTINGS[kind].split(".")
    descriptor = caffe_pb2.DESCRIPTOR.message_types_by_name[root]
    for name in names:
        field = descriptor.fields_by_name[name]
        descriptor = field.message_type
    return field


@pytest.mark.parametrize("kind", SETTINGS)
def test_legal_exactly_when_protobuf_takes_it(kind: str) -> None:
    field = setting(kind)
    for token in (*TOKENS.split(), ""):
        message = getattr(caffe_pb2, field.containing_type.name)()
        try:
            text_format.Parse(f"{field.name}: {token}", message)
            legal = True
        except text_format.ParseError:
            legal = False
        assert (problem(field, token) is None) == legal, token


@pytest.mark.parametrize(
    "kind, token, expected",
    [
        ("int32", "abc", "expected an integer, found 'abc'"),
        ("int32", '"0"', 'expected an integer, found "0"; write axis: 0 without quotes'),
        ("int32", "", "expected an integer, found the end of the file"),
        ("uint32", "-1", "expected an integer from 0 to 4294967295, found '-1'"),
        ("float", "fast", "expected a number, found 'fast'"),
        ("bool", "yes", "expected true or false, found 'yes'; write debug_info: true"),
        ("string", "LMDB", "expected a string in quotes, found 'LMDB'; write net: \"LMDB\""),
        ("string", '"a', 'the string "a has no closing quote on its line'),
        ("enum", "GPUU", "unknown value 'GPUU'; did you mean 'GPU'? (one of CPU, GPU)"),
        ("enum", "TPPXX", "unknown value 'TPPXX'; expected one of CPU, GPU"),
        (
            "enum",
            '"CPU"',
            "expected one of CPU, GPU, found a string; write solver_mode: CPU without quotes",
        ),
        ("enum", "gpu", "unknown value 'gpu'; did you mean 'GPU'? (one of CPU, GPU)"),
    ],
)
def test_sentences(kind: str, token: str, expected: str) -> None:
    assert problem(setting(kind), token) == expected


def test_shown_and_listing() -> None:
    assert [quoted(token) for token in ("a", '"a"', "")] == ["'a'", '"a"', "the end of the file"]
    assert quoted("9" * 100) == "'" + "9" * 60 + "...'"
    assert listing(["a", "b"]) == "a, b"
    assert listing(["a", "b", "c"], most=2) == "a, b, ..."
