"""The schema: the generated module is in step with caffe.proto, and both are Caffe's."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from poseidon.caffe.proto import caffe_pb2

SCHEMA = "poseidon/caffe/proto/caffe.proto"

# What Poseidon adds to Caffe's messages; everything of it is numbered from 1001.
ADDITIONS = {
    ("DataParameter", "shared_file_system"),
    ("HDF5DataParameter", "shared_file_system"),
    ("ImageDataParameter", "shared_file_system"),
    ("WindowDataParameter", "shared_file_system"),
    ("SolverState", "poseidon"),
}
# Messages and settings of other branches of Caffe, under the numbers that they have there.
OF_BRANCHES = """
BNParameter BoxAnnotatorOHEMParameter InterpParameter NormalizeParameter PSROIPoolingParameter
PermuteParameter PriorBoxParameter ROIPoolingParameter SeLuDropoutParameter SeLuParameter
ShuffleChannelParameter SmoothL1LossParameter bn_param box_annotator_ohem_param interp_param
label_type norm_param permute_param pre_fixed_normalizer prior_box_param psroi_pooling_param
roi_pooling_param scale_train selu_dropout_param selu_param shuffle_channel_param
smooth_l1_loss_param
"""
# Settings of branches whose numbers there belong to different settings: in text form only,
# numbered from 1001.
IN_TEXT_ONLY = """
AnchorTargetParameter DenseImageDataParameter ProposalParameter ProposalTargetParameter
ROIAlignParameter ROIDataParameter ReorgParameter UpsampleParameter anchor_target_param
ceil_mode class_weighting dense_image_data_param hole hole_h hole_w proposal_param
proposal_target_param reorg_param roi_align_param roi_data_param sample_weights_test
scale_factors upsample_param use_blob_size weight_by_label_freqs
"""
# SSD (Liu et al., 2016).
OF_SSD = """
AnnotatedDataParameter AnnotatedDatum Annotation AnnotationGroup BatchSampler
DetectionEvaluateParameter DetectionOutputParameter DistortionParameter EmitConstraint
ExpansionParameter LabelMap LabelMapItem MultiBoxLossParameter NoiseParameter
NonMaximumSuppressionParameter NormalizedBBox ResizeParameter SaltPepperParameter
SampleConstraint Sampler SaveOutputParameter annotated_data_param ap_version crop_h crop_w
detection_evaluate_param detection_output_param distort_param emit_constraint eval_type
expand_param multibox_loss_param noise_param resize_param show_per_class_result
"""
# Enums of other branches, by their message.
ENUMS_OF_BRANCHES = """
AnnotatedDatum BNParameter EmitConstraint ImageDataParameter MultiBoxLossParameter
PriorBoxParameter ResizeParameter
"""
SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def test_generated_module_is_in_step_with_the_schema(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which brings protoc, is not installed")
    fresh_path = tmp_path / "descriptors"
    # protoc runs in a process of its own: what its package warns of is not ours.
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            f"--descriptor_set_out={fresh_path}",
            SCHEMA,
        ],
        cwd=repository,
        check=True,
        timeout=60,
    )
    (fresh,) = FileDescriptorSet.FromString(fresh_path.read_bytes()).file
    committed = FileDescriptorProto.FromString(caffe_pb2.DESCRIPTOR.serialized_pb)
    assert _plain(committed) == _plain(fresh), (
        "caffe_pb2.py is not in step with caffe.proto: run make proto"
    )


def test_stubs_are_in_step_with_the_module(repository: Path) -> None:
    stubs = (repository / "poseidon" / "caffe" / "proto" / "caffe_pb2.pyi").read_text()
    classes = dict(part.split("(", 1) for part in stubs.split("\nclass ")[1:])
    for message in _messages():
        # A keyword of Python, such as lambda, cannot be an attribute in a stub.
        names = [field.name for field in message.fields if not iskeyword(field.name)]
        assert all(f"\n    {name}: " in classes[message.name] for name in names), "run make proto"


def test_fields_are_caffes(shared: Path) -> None:
    with (shared / "caffe" / "fields.csv").open(newline="") as file:
        expected = {
            (row["message"], row["field"]): (
                int(row["number"]),
                row["label"],
                row["type"],
                row["default"],
                row["packed"] == "packed",
            )
            for row in csv.DictReader(file)
        }
    found = {
        (message.name, field.name): (
            field.number,
            _label(field),
            _type(field),
            _default(field),
            bool(field.is_packed),
        )
        for message in _messages()
        for field in message.fields
    }
    ours = {key for key in found if key in ADDITIONS or key[0].startswith("Poseidon")}
    of_others = {*(OF_BRANCHES + OF_SSD + IN_TEXT_ONLY).split(), "ImageDataParameter.ignore_label"}
    ours |= {key for key in found if of_others.intersection((*key, ".".join(key)))}
    assert {key: found[key] for key in found.keys() - ours} == expected
    in_text_only = {key for key in found if key[1] in IN_TEXT_ONLY.split()}
    assert all(found[key][0] > 1000 for key in ADDITIONS | in_text_only)


def test_enums_are_caffes(shared: Path) -> None:
    with (shared / "caffe" / "enums.csv").open(newline="") as file:
        expected = {(row["enum"], row["value"], int(row["number"])) for row in csv.DictReader(file)}
    found = {
        (_name(enum), value.name, value.number)
        for enum in _enums()
        if _name(enum).partition(".")[0] not in ENUMS_OF_BRANCHES.split()
        for value in enum.values
        if value.number <= 1000
    }
    assert found == expected


def _plain(file: FileDescriptorProto) -> FileDescriptorProto:
    """The schema without what protoc and the runtime write differently: derived names, digits of
    floats.
    """
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
            if field.type == field.TYPE_FLOAT and field.default_value:
                field.default_value = f"{float(field.default_value):g}"
    return file


def _messages() -> Iterator[Descriptor]:
    yield from caffe_pb2.DESCRIPTOR.message_types_by_name.values()


def _enums() -> Iterator[EnumDescriptor]:
    yield from caffe_pb2.DESCRIPTOR.enum_types_by_name.values()
    for message in _messages():
        yield from message.enum_types


def _name(type_: Descriptor | EnumDescriptor) -> str:
    return str(type_.full_name).removeprefix("caffe.")


def _label(field: FieldDescriptor) -> str:
    return "repeated" if field.is_repeated else "required" if field.is_required else "optional"


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return f"message {_name(field.message_type)}"
    if field.enum_type is not None:
        return f"enum {_name(field.enum_type)}"
    return SCALARS[field.type]


def _default(field: FieldDescriptor) -> str:
    if not field.has_default_value:
        return ""
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    if isinstance(field.default_value, str):
        return field.default_value
    # A float default has 24 bits; six digits are what anybody wrote.
    return (
        f"{field.default_value:g}"
        if not isinstance(field.default_value, bool)
        else str(field.default_value).lower()
    )
