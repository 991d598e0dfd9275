"""Validation of a token as the value of a setting, and suggestions for unknown names.

Law: a token is legal here exactly if `google.protobuf.text_format` accepts it; its public
parsers of numbers, booleans and enums decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf import text_encoding, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from poseidon.caffe.proto.upgrade_v1 import current_name
from poseidon.errors import nearest

_FOREIGN_NAMES = {
    "lr": ("base_lr", "lr_mult"),
    "learning_rate": ("base_lr", "lr_mult"),
    "epochs": ("max_iter",),
    "max_epoch": ("max_iter",),
    "iterations": ("max_iter",),
    "num_iterations": ("max_iter",),
    "seed": ("random_seed",),
    "gpu": ("device_id", "solver_mode"),
    "gpu_id": ("device_id",),
    "mode": ("solver_mode",),
    "optimizer": ("type",),
    "steps": ("stepvalue",),
    "decay": ("weight_decay",),
    "kernel": ("kernel_size",),
    "padding": ("pad",),
    "filters": ("num_output",),
    "out_channels": ("num_output",),
    "units": ("num_output",),
    "fc_param": ("inner_product_param",),
    "ip_param": ("inner_product_param",),
    "linear_param": ("inner_product_param",),
    "bn_param": ("batch_norm_param",),
    "batch": ("batch_size",),
    "path": ("source",),
    "input_layer": ("bottom",),
    "inputs": ("bottom",),
    "outputs": ("top",),
    "output": ("top", "num_output"),
}
"""The names that other frameworks use, with Caffe's fields."""
_BLOCK = "_param"


def nearest_field(name: str, descriptor: Descriptor) -> str | None:
    """Return the field of a message that an unknown name most likely means, or
    None. Names of other frameworks are known.
    """
    fields = descriptor.fields_by_name
    known = _FOREIGN_NAMES.get(name.lower())
    if found := next((field for field in known or () if field in fields), None):
        return found
    if not name.endswith(_BLOCK):
        return nearest(name, fields)
    # The common ending would make any two blocks similar.
    stems = [field.removesuffix(_BLOCK) for field in fields if field.endswith(_BLOCK)]
    near = nearest(name.removesuffix(_BLOCK), stems)
    return None if near is None else near + _BLOCK


_RANGE = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
_QUOTES = ("'", '"')
_CURLY_QUOTES = tuple("“”„‘’«»")
_MAX_QUOTED = 60
_BOOLS = {
    "yes": "true",
    "on": "true",
    "true": "true",
    "no": "false",
    "off": "false",
    "false": "false",
}


def problem(setting: FieldDescriptor, token: str) -> str | None:
    """Return what is wrong with `token` as a value of `setting`, for an error message, or None
    if it is legal.

    Args:
        setting: a setting that takes a value, not a block.
        token: one token of prototxt, strings with their quotes; empty for the end of the file.
    """
    if setting.type in _RANGE:
        return _integer_problem(setting, token)
    if setting.type in _FLOATS:
        return _float_problem(setting, token)
    if setting.type == FieldDescriptor.TYPE_BOOL:
        if _parses(text_format.ParseBool, token):
            return None
        value = _BOOLS.get(token.strip("'\"").lower())
        hint = f"; write {setting.name}: {value}" if value else ""
        return f"expected true or false, found {quoted(token)}{hint}"
    if setting.enum_type is not None:
        return _enum_problem(setting, token)
    return _string_problem(setting, token)


def quoted(token: str) -> str:
    """Return a token for an error message: in quotes, or `the end of the file`."""
    if not token:
        return "the end of the file"
    if len(token) > _MAX_QUOTED:
        token = token[:_MAX_QUOTED] + "..."
    return token if is_quoted(token) else f"'{token}'"


def is_quoted(token: str) -> bool:
    """Return whether the token is a string, closed or not."""
    return token.startswith(_QUOTES)


def is_closed(token: str) -> bool:
    """Return whether a string has its closing quote."""
    return len(token) > 1 and token[-1] == token[0]


def listing(names: Sequence[str], most: int = 12) -> str:
    """Join names with commas, at most the first `most`."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _integer_problem(setting: FieldDescriptor, token: str) -> str | None:
    low, high = _RANGE[setting.type]
    if _parses(
        lambda text: text_format.ParseInteger(text, is_signed=low < 0, is_long=high > 2**32), token
    ):
        return None
    if _parses(lambda text: text_format.ParseInteger(text, is_signed=True, is_long=True), token):
        return f"expected an integer from {low} to {high}, found {quoted(token)}"
    hint = _unquoted_hint(setting, token)
    if not hint and _parses(text_format.ParseFloat, token):
        value = text_format.ParseFloat(token)
        hint = (
            f"; write {setting.name}: {int(value)}"
            if value.is_integer() and abs(value) < high
            else ""
        )
    return f"expected an integer, found {quoted(token)}{hint}"


def _float_problem(setting: FieldDescriptor, token: str) -> str | None:
    if _parses(text_format.ParseFloat, token):
        return None
    return f"expected a number, found {quoted(token)}{_unquoted_hint(setting, token)}"


def _enum_problem(setting: FieldDescriptor, token: str) -> str | None:
    if _parses(lambda text: text_format.ParseEnum(setting, text), token):
        return None
    assert setting.enum_type is not None
    legal = [value.name for value in setting.enum_type.values]
    bare = token.strip("'\"")
    if is_quoted(token) and bare in legal:
        return f"expected one of {listing(legal)}, found a string; write {setting.name}: {bare} without quotes"
    near = nearest(bare, legal)
    if is_quoted(token) and setting.full_name == "caffe.V1LayerParameter.type":
        old = f"; for layers it would be {near} without quotes" if near else ""
        return f"found {quoted(token)}; a type in quotes needs a block named layer, not layers{old}"
    if near:
        return f"unknown value {quoted(token)}; did you mean '{near}'? (one of {listing(legal)})"
    return f"unknown value {quoted(token)}; expected one of {listing(legal, most=len(legal))}"


def _string_problem(setting: FieldDescriptor, token: str) -> str | None:
    if not is_quoted(token):
        layer_type = current_name(token) if setting.full_name == "caffe.LayerParameter.type" else ""
        plain = token and (token[0].isalpha() or token[0] in "_./~")
        hint = f'; write {setting.name}: "{layer_type or token}"' if plain else ""
        if token[:1] in _CURLY_QUOTES:
            hint = """; write straight quotes, ' or \""""
        return f"expected a string in quotes, found {quoted(token)}{hint}"
    if not is_closed(token):
        return f"the string {quoted(token)} has no closing quote on its line"
    try:
        content = text_encoding.CUnescape(token[1:-1])
        if setting.type == FieldDescriptor.TYPE_STRING:
            content.decode("utf-8")
    except ValueError:
        return f"the string {quoted(token)} has an illegal escape sequence"
    return None


def _unquoted_hint(setting: FieldDescriptor, token: str) -> str:
    """Return the hint for a number in quotes, as in the original Poseidon's `device_id: "0"`."""
    bare = token[1:-1]
    if not is_quoted(token) or not _parses(text_format.ParseFloat, bare):
        return ""
    return f"; write {setting.name}: {bare} without quotes"


def _parses(parse: Callable[[str], object], token: str) -> bool:
    try:
        parse(token)
    except ValueError:
        return False
    return True
