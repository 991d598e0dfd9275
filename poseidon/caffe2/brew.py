"""Layers by function call: `brew.conv(model, "data", "conv1", 3, 64, kernel=7)`.

A helper takes its defaults from the model's `arg_scope`, then from `brew.arg_scope` contexts.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from poseidon.caffe2.helpers import conv as convolutions
from poseidon.caffe2.helpers import layers, normalization, train
from poseidon.caffe2.model_helper import ModelHelper


class _Scope(threading.local):
    """The default arguments of a thread by helper."""

    def __init__(self) -> None:
        self.arguments: dict[str, dict[str, Any]] = {}


_scope = _Scope()


def get_current_scope() -> dict[str, dict[str, Any]]:
    """Return the default arguments of each helper."""
    return _scope.arguments


@contextmanager
def scoped(names: list[str], arguments: dict[str, Any]) -> Iterator[None]:
    """Give helpers default arguments; the defaults of an inner context win."""
    outer = _scope.arguments
    _scope.arguments = {**outer, **{name: {**outer.get(name, {}), **arguments} for name in names}}
    try:
        yield
    finally:
        _scope.arguments = outer


_registry: dict[str, Callable[..., Any]] = {}


def Register(helper: Callable[..., Any]) -> None:
    """Add a helper under its own name.

    Raises:
        AttributeError: there is one of that name.
    """
    name = helper.__name__
    if has_helper(name):
        raise AttributeError(f"Helper {name} already exists. Please change your helper name.")
    _registry[name] = helper


def has_helper(name_or_helper: str | Callable[..., Any]) -> bool:
    """Return whether there is a helper of a name, or of a function's name."""
    name = name_or_helper if isinstance(name_or_helper, str) else name_or_helper.__name__
    return name in _registry


def arg_scope(single_helper_or_list: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Give helpers default arguments inside the context.

    Args:
        single_helper_or_list: one helper or several.
        kwargs: the arguments.

    Raises:
        AssertionError: one is not a helper.
    """
    helpers = (
        single_helper_or_list
        if isinstance(single_helper_or_list, list)
        else [single_helper_or_list]
    )
    for helper in helpers:
        assert callable(helper), f"arg_scope: expected helpers, such as brew.conv, found {helper!r}"
        assert has_helper(helper), f"Helper {helper.__name__} is not registered."
    return scoped([helper.__name__ for helper in helpers], kwargs)


def _wrap(name: str) -> Callable[..., Any]:
    helper = _registry[name]
    parameters = inspect.signature(helper).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {parameter.name for parameter in parameters}

    def call(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args and isinstance(args[0], ModelHelper) else kwargs.get("model")
        if model is None:
            raise RuntimeError(
                "The first input of helper function should be model. "
                "Or you can provide it in kwargs as model=<your_model>."
            )
        defaults = {k: value for k, value in model.arg_scope.items() if takes_all or k in accepted}
        return helper(*args, **{**defaults, **get_current_scope().get(name, {}), **kwargs})

    call.__name__ = name
    call.__doc__ = helper.__doc__
    return call


def __getattr__(name: str) -> Any:
    if name not in _registry:
        raise AttributeError(f"Helper function {name} not registered.")
    return _wrap(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_registry])


_FAMILIES: dict[Any, str] = {
    convolutions: "conv conv_nd conv_transpose group_conv group_conv_deprecated",
    layers: "fc packed_fc elementwise_linear relu tanh prelu dropout "
    "max_pool average_pool max_pool_with_index concat depth_concat "
    "transpose sum reduce_sum sub add mat_mul batch_mat_mul arg_max arg_min",
    normalization: "lrn softmax instance_norm spatial_bn spatial_gn layer_norm "
    "moments_with_running_stats",
    train: "image_input db_input cond loop iter accuracy add_weight_decay",
}
for _module, _names in _FAMILIES.items():
    for _name in _names.split():
        Register(getattr(_module, _name))
