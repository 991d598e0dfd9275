"""Caffe2's messages: the generated modules are in step with the .proto files, and these with
Caffe2's fields.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from poseidon.caffe2.proto import (
    DEVICE_NUMBERS,
    caffe2_pb2,
    hsm_pb2,
    metanet_pb2,
    predictor_consts_pb2,
    prof_dag_pb2,
)

MODULES: list[Any] = [caffe2_pb2, metanet_pb2, predictor_consts_pb2, prof_dag_pb2, hsm_pb2]
KINDS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def test_generated_modules_are_in_step_with_the_schema(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which brings protoc, is not installed")
    fresh_path = tmp_path / "descriptors"
    files = [module.DESCRIPTOR.name for module in MODULES]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            f"--descriptor_set_out={fresh_path}",
            *files,
        ],
        cwd=repository,
        check=True,
        timeout=60,
    )
    fresh = {file.name: file for file in FileDescriptorSet.FromString(fresh_path.read_bytes()).file}
    for module in MODULES:
        committed = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        expected = fresh[module.DESCRIPTOR.name]
        for file in (committed, expected):
            for message in file.message_type:
                for field in [
                    *message.field,
                    *(f for inner in message.nested_type for f in inner.field),
                ]:
                    field.ClearField("json_name")
        assert committed == expected, "run make proto"


def test_fields_are_caffe2s(shared: Path) -> None:
    with (shared / "caffe2" / "fields.csv").open(newline="") as file:
        expected = {
            (row["message"], row["field"]): (
                int(row["number"]),
                row["label"],
                row["type"],
                row["packed"] == "1",
            )
            for row in csv.DictReader(file)
        }
    found = {
        (_name(message), field.name): (
            field.number,
            _label(field),
            _kind(field),
            bool(field.is_packed),
        )
        for message in _messages()
        for field in message.fields
    }
    assert found == expected


def test_defaults_are_caffe2s(shared: Path) -> None:
    with (shared / "caffe2" / "fields.csv").open(newline="") as file:
        expected = {
            (row["message"], row["field"]): row["default"]
            for row in csv.DictReader(file)
            if row["default"]
        }
    found = {
        (_name(message), field.name): _default(field)
        for message in _messages()
        for field in message.fields
        if field.has_default_value
    }
    assert found == expected


def test_enums_are_caffe2s(shared: Path) -> None:
    with (shared / "caffe2" / "enums.csv").open(newline="") as file:
        rows = [(row["enum"], row["name"], int(row["number"])) for row in csv.DictReader(file)]
    enums = {
        enum.full_name.removeprefix("poseidon.caffe2."): enum
        for owner in (caffe2_pb2.DESCRIPTOR, *_messages())
        for enum in (owner.enum_types_by_name.values())
    }
    for enum, name, number in rows:
        if enum == "DeviceType":
            assert DEVICE_NUMBERS[name] == getattr(caffe2_pb2, name) == number
        else:
            assert enums[enum].values_by_name[name].number == number


def test_messages_do_not_clash_with_caffe2s() -> None:
    assert caffe2_pb2.NetDef.DESCRIPTOR.full_name == "poseidon.caffe2.NetDef"


def _messages() -> Iterator[Descriptor]:
    for module in MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            yield message
            yield from message.nested_types


def _name(message: Descriptor) -> str:
    return message.full_name.removeprefix("poseidon.caffe2.")


def _label(field: FieldDescriptor) -> str:
    return "repeated" if field.is_repeated else "required" if field.is_required else "optional"


def _kind(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    return kind.full_name.replace("poseidon.", "") if kind else KINDS[field.type]


def _default(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    return (
        str(field.default_value).lower()
        if isinstance(field.default_value, bool)
        else str(field.default_value)
    )
