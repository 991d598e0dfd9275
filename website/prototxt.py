"""Pages of the prototxt reference: the schema's messages and fields, and the docstrings of the
layer types.

Law: the fields, their types and defaults come from the compiled schema. Their descriptions are
the comments of `poseidon/caffe/proto/caffe.proto`. A message has one place; the types of fields link to
it.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from poseidon.caffe.layers.registry import known_types, layer_class
from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.proto.caffe_pb2 import LayerParameter
from poseidon.pycaffe.net_spec import param_name_dict
from tests.support.compatibility import BLOCKS, NOT_OF_TYPE, effect

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "reference/prototxt"
GROUPS = {
    "inputs": ("Data layers", "Layers without bottoms, which read or make data."),
    "vision": ("Vision layers", "Layers over images: N x C x H x W."),
    "neuron": (
        "Activation and normalization layers",
        "Layers whose top has the shape of the bottom.",
    ),
    "common": ("Common layers", "Inner products, recurrence, reductions, and changes of shape."),
    "loss": ("Loss layers", "Losses and scores."),
    "ssd": ("Detection layers", "Layers of SSD."),
}
"""The title and the first sentence of each page of layers."""
GROUP_OF = {
    **dict.fromkeys(("sources", "database_data", "image_data"), "inputs"),
    **dict.fromkeys(
        ("convolution", "pooling", "resize", "regions", "proposal", "detection"), "vision"
    ),
    **dict.fromkeys(("activation", "batch_norm", "normalization", "pointwise"), "neuron"),
    **dict.fromkeys(("classification_loss", "distance_loss", "ohem"), "loss"),
    **dict.fromkeys(("matching", "multibox_loss", "detection_output", "saved_results"), "ssd"),
}
"""The page of the layers of a module of `poseidon.caffe.layers`; all others are common layers."""
MESSAGES = {
    "net": (
        "NetParameter",
        "LayerParameter",
        "ParamSpec",
        "NetState",
        "NetStateRule",
        "FillerParameter",
        "BlobShape",
    ),
    "solver": ("SolverParameter",),
    "transformation": (
        *("TransformationParameter", "ResizeParameter", "NoiseParameter", "SaltPepperParameter"),
        *("DistortionParameter", "ExpansionParameter", "EmitConstraint"),
    ),
    "inputs": ("BatchSampler", "Sampler", "SampleConstraint"),
    "loss": ("LossParameter",),
    "ssd": ("NonMaximumSuppressionParameter", "SaveOutputParameter"),
}
"""The messages that have a section of their own, by page.

The others are below the layer type that reads them.
"""
ALSO = ("transform_param", "loss_param")
"""Blocks that several types read, which have one place."""
_INTRODUCTIONS = {
    "net": (
        "# Nets",
        "A net is a file with a NetParameter: its name and its layers, from the bottom up. "
        "[Train Caffe definitions](../../caffe_jobs.md) shows whole files. Enumerations are "
        "written by name, "
        "strings in quotes, messages in braces. A repeated field is written once for each value.",
    ),
    "solver": (
        "# Solvers",
        "A solver is a file with a SolverParameter. `poseidon train --set FIELD=VALUE` sets a "
        "field for one job. "
        "The formulas of `lr_policy` are Caffe's.",
    ),
    "transformation": (
        "# Transformations",
        "Data layers transform each image as their `transform_param` says: the steps of SSD, the "
        "crop, "
        "the mirror, the mean, the scale.",
    ),
}


def pages() -> dict[str, str]:
    """Return the Markdown of each page of the reference, by its path on the site."""
    found = {f"{FOLDER}/{name}.md": "\n".join(_page(name)) for name in (*_INTRODUCTIONS, *GROUPS)}
    found["reference/layers.md"] = "\n".join(_index())
    return found


def _page(name: str) -> Iterator[str]:
    if name in _INTRODUCTIONS:
        yield "\n\n".join(_INTRODUCTIONS[name]) + "\n"
    else:
        title, first = GROUPS[name]
        yield f"# {title}\n\n{first} [All layer types](../layers.md).\n"
        for kind in _types(name):
            yield from _layer(kind)
    for message in MESSAGES.get(name, ()):
        yield f"## {message}\n"
        yield from _table(name, _descriptor(message).fields)


def _index() -> Iterator[str]:
    yield (
        "# Layers\n\nAll layer types. [Caffe compatibility](../caffe_compatibility.md) says how well "
        "each agrees with Caffe. [Write a layer](../own_layers.md) shows how to add a type.\n"
    )
    yield "| type | page | |\n|---|---|---|"
    for kind in sorted(known_types(), key=str.lower):
        group = _group(kind)
        sentence = (inspect.getdoc(layer_class(kind)) or "").split("\n\n")[0].replace("\n", " ")
        yield f"| [{kind}](prototxt/{group}.md#{kind.lower()}) | {GROUPS[group][0]} | {escaped(sentence)} |"
    yield ""


def _types(group: str) -> list[str]:
    return sorted((kind for kind in known_types() if _group(kind) == group), key=str.lower)


def _group(kind: str) -> str:
    module = layer_class(kind).__module__.rpartition(".")[2]
    return GROUP_OF.get(module, "common")


def _layer(kind: str) -> Iterator[str]:
    page = _group(kind)
    yield f"## {kind}\n\n{_linked(inspect.getdoc(layer_class(kind)) or '', page, kind)}\n"
    for block in _blocks(kind):
        message = LayerParameter.DESCRIPTOR.fields_by_name[block].message_type
        left_out = sorted(NOT_OF_TYPE.get(kind, set()) & {field.name for field in message.fields})
        if block in ALSO:
            without = f" without {', '.join(f'`{name}`' for name in left_out)}" if left_out else ""
            yield f"`{block}`: {_link(message, page)}{without}.\n"
        else:
            yield f"`{block}`:\n"
            yield from _table(
                page, [field for field in message.fields if field.name not in left_out]
            )


def _blocks(kind: str) -> tuple[str, ...]:
    own = param_name_dict()
    return BLOCKS.get(kind, (own[kind],) if kind in own else ())


def _table(page: str, fields: Iterable[FieldDescriptor]) -> Iterator[str]:
    """Yield the lines of a table of fields; a layer's blocks, which are sections of their own,
    are one line.
    """
    shown = [field for field in fields if not (_is_layer(field) and field.name.endswith("_param"))]
    described = {field.name: _description(field) for field in shown}
    column = any(described.values())
    yield f"| field | type | default |{' |' if column else ''}\n|---|---|---|{'---|' if column else ''}"
    for field in shown:
        text = f" {_cell(described[field.name])} |" if column else ""
        yield f"| `{field.name}` | {_type(field, page)} | {_default(field)} |{text}"
    if any(_is_layer(field) for field in shown):
        yield "| `..._param` | | | The settings of a type: see [its section](../layers.md). |"
    yield ""


def _is_layer(field: FieldDescriptor) -> bool:
    return field.containing_type.name == "LayerParameter"


def _description(field: FieldDescriptor) -> str:
    nothing = effect(field)
    said = _comments().get((field.containing_type.full_name, field.name), "")
    parts = (said, f"{nothing[0].upper()}{nothing[1:]}." if nothing and not said else "")
    return " ".join(part for part in parts if part)


def _cell(text: str) -> str:
    return re.sub(r"^Deprecated:", "**Deprecated**:", escaped(text))


def _type(field: FieldDescriptor, page: str) -> str:
    if field.message_type is not None:
        name = _link(field.message_type, page)
    elif field.enum_type is not None:
        name = ", ".join(f"`{value.name}`" for value in field.enum_type.values)
    else:
        name = _SCALARS[field.type]
    return f"{'repeated ' if field.is_repeated else 'required ' if field.is_required else ''}{name}"


_SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}


def _default(field: FieldDescriptor) -> str:
    if not field.has_default_value:
        return ""
    value = field.default_value
    if field.enum_type is not None:
        return f"`{field.enum_type.values_by_number[value].name}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"


def _link(message: Descriptor, page: str) -> str:
    """Return a message's name, with a link where it has a section."""
    for name, messages in MESSAGES.items():
        if message.name in messages:
            return (
                f"[{message.name}]({'' if name == page else f'{name}.md'}#{message.name.lower()})"
            )
    return message.name


def _descriptor(name: str) -> Descriptor:
    return caffe_pb2.DESCRIPTOR.message_types_by_name[name]


@cache
def _comments() -> dict[tuple[str, str], str]:
    """Return the comment of each field in `caffe.proto`: (message, field) -> text. A comment on the
    field's line takes precedence over the comment above it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "descriptors")
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_source_info"]
        command += [f"--descriptor_set_out={path}", "poseidon/caffe/proto/caffe.proto"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        (file,) = FileDescriptorSet.FromString(path.read_bytes()).file
    found = {}
    for place in file.source_code_info.location:
        text = " ".join((place.trailing_comments or place.leading_comments).split())
        # message, field
        if text and len(place.path) == 4 and (place.path[0], place.path[2]) == (4, 2):
            message = file.message_type[place.path[1]]
            found[f"{file.package}.{message.name}", message.field[place.path[3]].name] = text
    return found


def _linked(text: str, page: str, kind: str) -> str:
    """Return a docstring as Markdown, with links to the layer types that it names."""
    text = re.sub(r"^(Bottoms?|Tops?|Fields|Blobs)\b(?=[ :])", r"@@\1@@", text, flags=re.MULTILINE)

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known_types() or name == kind:
            return match[0]
        return f"[{name}]({'' if _group(name) == page else f'{_group(name)}.md'}#{name.lower()})"

    return re.sub(r"`(\w+)`", replace, escaped(text)).replace("@@", "**")


def escaped(text: str) -> str:
    """Return text as Markdown: its formulas have signs that Markdown reads as its own.

    Code in backticks stays.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part.replace("|", r"\|") if index % 2 else re.sub(r"([*_<>\[\]|])", r"\\\1", part)
        for index, part in enumerate(parts)
    )
