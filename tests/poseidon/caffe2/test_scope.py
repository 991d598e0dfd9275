"""Name scopes and device scopes."""

from __future__ import annotations

import threading

import pytest

from poseidon.caffe2 import core, scope

GPU = core.DeviceOption(1, 9)


def test_name_scopes_nest() -> None:
    with scope.NameScope("a"):
        with scope.NameScope("b"):
            assert scope.CurrentNameScope() == "a/b/"
        with scope.NameScope("c", reset=True):
            assert scope.CurrentNameScope() == "c/"
        with scope.EmptyNameScope():
            assert scope.CurrentNameScope() == ""
        with scope.NameScope(""):
            assert scope.CurrentNameScope() == "a/"
    assert scope.CurrentNameScope() == ""


def test_a_scope_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), scope.NameScope("a"), scope.DeviceScope(GPU):
        raise KeyError
    assert scope.CurrentNameScope() == ""
    assert scope.CurrentDeviceScope() is None


def test_the_inner_device_counts() -> None:
    with scope.DeviceScope(GPU):
        with scope.DeviceScope(core.DeviceOption(0)):
            assert core.CreateOperator("Relu", "x", "y").device_option.device_type == 0
        with scope.EmptyDeviceScope():
            assert not core.CreateOperator("Relu", "x", "y").HasField("device_option")
        own = core.CreateOperator("Relu", "x", "y", device_option=core.DeviceOption(1, 3))
        assert own.device_option.device_id == 3
        assert core.CreateOperator("Relu", "x", "y").device_option == GPU


def test_node_names_and_extra_information_are_inherited() -> None:
    with (
        scope.DeviceScope(core.DeviceOption(0, extra_info=["b:2"]), node_name="node"),
        scope.DeviceScope(core.DeviceOption(0, extra_info=["c:3", "a:1"])),
    ):
        device = scope.CurrentDeviceScope()
        assert device is not None
        assert list(device.extra_info) == ["a:1", "b:2", "c:3"]
        assert device.node_name == "node"


@pytest.mark.parametrize("enter", [lambda: scope.NameScope(3), lambda: scope.DeviceScope("gpu")])
def test_what_is_no_scope_is_refused(enter: object) -> None:
    with pytest.raises(AssertionError), enter():  # type: ignore[operator]
        pass


def test_a_thread_has_scopes_of_its_own() -> None:
    found: list[object] = []
    with scope.NameScope("a"), scope.DeviceScope(GPU):
        thread = threading.Thread(
            target=lambda: found.extend([scope.CurrentNameScope(), scope.CurrentDeviceScope()])
        )
        thread.start()
        thread.join()
    assert found == ["", None]


def test_a_device_scope_of_a_node_on_the_cpu() -> None:
    with core.DeviceScope(0, node_name="node:1"):
        op = core.CreateOperator("Relu", "x", "y")
    assert (op.device_option.device_type, op.device_option.node_name) == (0, "node:1")
    with pytest.raises(AssertionError, match="DeviceOption"), core.DeviceScope(1):  # type: ignore[arg-type]
        pass
