"""The builder of steps: nets and inner builders in order, with a blob that stops them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import context, core
from poseidon.caffe2.core.net import _prefixes


class NetBuilder(context.Managed):
    """Collects nets and builders; a block of it is a step that runs them in order.

    A blob, the stop blob, ends the step early where an operation asks for it. A builder with
    control operators is one net instead: its blocks are operators `If` and `While`.
    """

    def __init__(
        self,
        name: str | None = None,
        initial_scope: Iterable[Any] | None = None,
        _stop_blob_required: bool = False,
        _stop_blob: Any = None,
        _fullname: str | None = None,
        _use_control_ops: bool = False,
    ) -> None:
        """Make a builder inside the current one.

        Args:
            name: of its nets, behind the name of the builder around.
            initial_scope: blobs that exist before.
            _stop_blob_required: whether a block without a stop condition is an error.
            _stop_blob: the blob that stops it; by default it is made where it is needed.
            _fullname: the name without the name of the builder around it.
            _use_control_ops: see the class.
        """
        assert not _fullname or not name, "Cannot set both _fullname and name"
        assert not _use_control_ops or not (_stop_blob_required or _stop_blob), (
            "Stop blobs are not used with control operators"
        )
        parent = NetBuilder.current(required=False)
        outer = parent.name if parent else ""
        self.name = _fullname or "/".join(part for part in (outer, name) if part)
        self._frozen = False
        self._current_net: core.Net | None = None
        self._children: list[Any] = []
        outside = parent._update_lexical_scope() if parent else set()
        self._init_lexical_scope = outside | {str(blob) for blob in initial_scope or ()}
        self._lexical_scope = set(self._init_lexical_scope)
        self._stop_blob = _stop_blob
        self._stop_blob_required = _stop_blob_required
        self._use_control_ops = _use_control_ops
        self._depth = 0

    def stop_blob(self) -> core.BlobReference:
        """Return the stop blob; it is made, false, where there is none yet."""
        assert not self._use_control_ops, "Stop blobs are not used with control operators"
        if self._stop_blob is None:
            net = self.current_net()
            self._stop_blob = core.BlobReference(net.NextName("stop_blob"), net=net)
            net.Const(False, blob_out=self._stop_blob)
            if self._current_net is not self._children[0]:
                first = core.Net("stop_blob_init")
                first.Const(False, blob_out=self._stop_blob)
                self._children.insert(0, first)
        return self._stop_blob  # type: ignore[no-any-return]

    def stop_if(self, blob: Any) -> None:
        """End the step where a boolean is true."""
        stop = self.stop_blob()
        self.current_net().Or([stop, blob], [stop])
        self._current_net = None

    def _assert_mutable(self) -> None:
        assert not self._frozen, f"This NetBuilder ({self.name}) has been built already."

    def _update_lexical_scope(self) -> set[str]:
        """Return the blobs that exist now: the initial ones and the outputs of the nets so far."""
        self._lexical_scope = set(self._init_lexical_scope)
        for child in self._children:
            if isinstance(child, core.Net):
                self._lexical_scope |= child.UsedBlobNames()
            elif isinstance(child, NetBuilder) and child._use_control_ops:
                self._lexical_scope |= child._lexical_scope
        return set(self._lexical_scope)

    def _take_children(self) -> list[Any]:
        children, self._children, self._current_net = self._children, [], None
        self._lexical_scope = set(self._init_lexical_scope)
        return children

    def add(self, child: Any) -> Any:
        """Append a net, a step, a builder or a task group; return it.

        Raises:
            AssertionError: the builder is frozen, or has control operators and cannot have such a
                child.
        """
        self._assert_mutable()
        assert (
            not self._use_control_ops or isinstance(child, core.Net) or _has_control_ops(child)
        ), "Expected Net or NetBuilder with control ops"
        self._current_net = child if isinstance(child, core.Net) else None
        self._children.append(child)
        self._update_lexical_scope()
        return child

    def current_net(self, name: str | None = None) -> core.Net:
        """Return the net that operators go to now; a name begins a new one."""
        self._assert_mutable()
        if self._current_net is None or name is not None:
            self.add(core.Net(name or ""))
        assert self._current_net is not None
        return self._current_net

    def freeze(self) -> None:
        """Allow no more changes."""
        for child in self._children:
            if hasattr(child, "freeze"):
                child.freeze()
        self._current_net = None
        self._frozen = True

    def get(self) -> list[Any]:
        """Return the nets, steps and builders; this one is frozen."""
        self.freeze()
        return self._children

    def __enter__(self) -> NetBuilder:
        super().__enter__()
        self._depth = len(_prefixes.names)
        _prefixes.names.append(self.name)
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        super().__exit__(kind, *arguments)
        del _prefixes.names[self._depth :]
        if self._use_control_ops and self._children and kind is None:
            net = self.merge_nets(self._take_children(), self._lexical_scope)
            assert net is not None
            self._children = [net]
        self.freeze()
        assert kind is not None or self._stop_blob is not None or not self._stop_blob_required, (
            f"This NetBuilder ({self.name}) requires a stop condition: ops.stop() or ops.stop_if()"
        )

    @staticmethod
    def merge_nets(
        nets_or_builders: Iterable[Any], outer_blob_names: Iterable[str]
    ) -> core.Net | None:
        """Return one net of nets and of builders with control operators; None where there are none.

        Its external outputs are those that exist outside: a blob that one child makes and the next
        one changes is local.
        """
        merged: core.Net | None = None
        for part in nets_or_builders:
            if isinstance(part, NetBuilder):
                assert part._use_control_ops, "Merging of NetBuilder supported only for control ops"
                (net,) = part.get()
            else:
                net = part
            merged = net if merged is None else merged.AppendNet(net)
        if merged is not None:
            outside = set(outer_blob_names)
            kept = [name for name in merged.Proto().external_output if name in outside]
            merged.Proto().external_output[:] = kept
        return merged

    def __str__(self) -> str:
        return self.name or "Un-named NetBuilder"


def _has_control_ops(child: Any) -> bool:
    return isinstance(child, NetBuilder) and child._use_control_ops
