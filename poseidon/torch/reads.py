"""Reads of the module's tensors while their values are on their way.

Once its gradient has left, within a backward pass or at its end, the memory of a parameter belongs
to the exchange; after the step its new value is on its way. Meanwhile the tensor has a class of its own,
whose `__torch_function__` first lets the group bring the value. Whatever reads it from Python waits:
an operation, `data`, `detach`, `repr`, a copy, pickle. What asks for no value (`shape`, `grad`,
`requires_grad`) does not. When its value has come, the tensor has its usual class again, so a loop
that reads nothing runs without a call of this module, except for a change of classes in each step.

An alias of a tensor's memory (a view, `detach`, an array of numpy that was made before) cannot wait.
A tensor that has one at the end of a step is waited for there.

Not seen: code in C++ that takes the tensor itself (a function of torch.jit, `torch.tensor(p)`), and
addresses (`data_ptr`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._functorch import eager_transforms, vmap

from poseidon.errors import UsageError
from poseidon.exchange.base import local_of
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.torch.factor_rows import tensors_in

_PROPERTIES = (
    "_backward_hooks",
    "_base",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "storage_offset",
    "stride",
)
_WITHOUT_VALUE = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
        Tensor.grad.__set__,  # type: ignore[union-attr]
        Tensor.grad.__delete__,  # type: ignore[union-attr]
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    ]
)
"""What torch calls of a tensor without a look at its value."""


def _once_read(name: str) -> Callable[..., Any]:
    """Return a method that torch does not pass to `__torch_function__`."""

    def method(tensor: OnItsWay, *arguments: Any, **named: Any) -> Any:
        type(tensor).reads.read(tensor)
        return getattr(tensor, name)(*arguments, **named)

    return method


class OnItsWay:
    """The class of a tensor whose value is on its way, beside the tensor's own class.

    Attributes:
        reads: that brings the value.
    """

    __slots__ = ()
    reads: ClassVar[Reads]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if function in _WITHOUT_VALUE:
            with DisableTorchFunctionSubclass():
                return function(*args, **named)
        for tensor in list(tensors_in((args, named))):
            if isinstance(tensor, OnItsWay):
                type(tensor).reads.read(tensor)
        result = function(*args, **named)
        # nn.Parameter(p) expects of a class that it does not know `detach` to keep the class.
        if function is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return Tensor._make_subclass(nn.Parameter, result)
        return result

    __deepcopy__ = _once_read("__deepcopy__")
    __reduce_ex__ = _once_read("__reduce_ex__")
    as_subclass = _once_read("as_subclass")


leave_out_of_graphs(
    OnItsWay.__torch_function__.__func__,  # type: ignore[attr-defined]
    "a parameter whose value is on its way after a step of poseidon.distribute",
)


def _waiting_for_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that lets its first argument have its value."""

    def call(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(tensor, OnItsWay):
            type(tensor).reads.read(tensor)
        return function(tensor, *arguments, **named)

    return call


# The transforms of torch.func pass their arguments to functions in C++ that know no
# `__torch_function__`.
for _module, _name in (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
):
    if hasattr(_module, _name):
        setattr(_module, _name, _waiting_for_first(getattr(_module, _name)))


class Reads:
    """Lets reads of a module's tensors wait. Any thread may read.

    Args:
        module: has the tensors.
        bring: called with an index where a tensor is read before its value has come. It calls
            `came`, or raises.
        held: tensors of the exchange that share memory with the module's. Nothing else does yet.

    Attributes:
        aliases: what else has the memory of the tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        guarded: Mapping[int, Tensor],
        bring: Callable[[int], None],
        held: Sequence[Tensor] = (),
    ) -> None:
        self._guarded = dict(guarded)
        self._indices: dict[object, int] = {tensor: index for index, tensor in guarded.items()}
        self._bring = bring
        self._kinds: dict[type, type] = {}
        self._own: dict[int, type] = {}
        """The usual class of each tensor whose class is different now."""
        self._process = os.getpid()
        self.turn = threading.RLock()
        """Held by the thread that calls the exchange."""
        members = [*module.parameters(), *module.buffers(), *held]
        self.aliases = Aliases(self._guarded, members)

    def leave(self, indices: Collection[int] | None = None) -> None:
        """Note that the memory of tensors belongs to the exchange, until their values come.

        Args:
            indices: of some of the guarded ones; None: of all.
        """
        for index in self._guarded if indices is None else indices:
            if index in self._guarded and index not in self._own:
                tensor = self._guarded[index]
                kind = self._own[index] = type(tensor)
                tensor.__class__ = self._kinds.get(kind) or self._new_kind(kind)

    def read_aliased(self) -> None:
        """Let tensors whose memory something else shares have their values at once."""
        for index in self.aliases.found():
            if index in self._own:
                self.read(self._guarded[index])

    def came(self, index: int) -> None:
        """Note that a tensor has its value."""
        if index in self._own:
            self._guarded[index].__class__ = self._own.pop(index)

    def all_came(self) -> None:
        """Note that all tensors have their values."""
        for index in list(self._own):
            self.came(index)

    @property
    def is_fork(self) -> bool:
        """Whether this is a process that the worker has forked: no value comes here."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse a fork of the worker that needs values which were on their way as it was forked."""
        if self._own and self.is_fork:
            raise UsageError(
                "a process that was started after step(), such as a loader's, reads a parameter "
                "before its new value has arrived; call group.settle() before starting the process"
            )

    def read(self, tensor: Tensor | OnItsWay) -> None:
        """Bring the value of a tensor.

        Raises:
            UsageError: it cannot be read now, or here.
            ServerError: it did not come.
        """
        self.check_process()
        with self.turn:
            if isinstance(tensor, OnItsWay):
                self._bring(self._indices[tensor])

    def _part(self, tensor: Any) -> Tensor:
        """Return this worker's part of a tensor, with its value."""
        self.read(tensor)
        return local_of(tensor)

    def _new_kind(self, kind: type) -> type:
        names: dict[str, Any] = {"reads": self, "__slots__": ()}
        if hasattr(kind, "_local_tensor"):  # torch's DTensor reads it in Python
            names["_local_tensor"] = property(self._part)
        self._kinds[kind] = type(kind.__name__, (OnItsWay, kind), names)
        return self._kinds[kind]


_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
"""Return how many tensors share a storage; 0 in versions of torch that do not count on a CPU."""


class Aliases:
    """Counts what shares the memory of tensors, beside the module and the exchange.

    Args:
        members: what shares the memory of the tensors, or of others, and is not the script's.
    """

    def __init__(self, tensors: Mapping[int, Tensor], members: Sequence[Tensor]) -> None:
        # kept: to look one up costs ten times as much as to count
        self._storages = [local_of(tensor).untyped_storage() for tensor in tensors.values()]
        self._addresses = [storage._cdata for storage in self._storages]
        self._indices = list(tensors)
        self._places = {index: at for at, index in enumerate(tensors)}
        self._is_shared = [
            storage.is_shared() and not storage.is_cuda for storage in self._storages
        ]
        own = Counter(
            local_of(member).untyped_storage()._cdata
            for member in {id(member): member for member in members}.values()
            if member.layout is torch.strided
        )
        self._users = [  # aliases of the script's
            count - own[address] - 1
            for count, address in zip(self._counts(), self._addresses, strict=True)
        ]
        self._expected = self._counts()

    def _counts(self) -> list[int]:
        return list(map(_use_count, self._addresses))

    def note_own(self) -> None:
        """Note that what has come since the construction is the exchange's."""
        self._expected = [n - u for n, u in zip(self._counts(), self._users, strict=True)]

    def has(self, index: int) -> bool:
        """Return whether a tensor has an alias of the script's in this process."""
        at = self._places[index]
        return _use_count(self._addresses[at]) > self._expected[at]

    def found(self) -> list[int]:
        """Return the indices of the tensors that have an alias of the script's."""
        counts = self._counts()
        return [
            index
            for at, (index, count) in enumerate(zip(self._indices, counts, strict=True))
            if count > self._expected[at] or self._is_shared[at]
        ]
