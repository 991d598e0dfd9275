"""Contexts: the innermost is the current one, in each thread."""

from __future__ import annotations

import threading

import pytest

from poseidon.caffe2 import context


class Plain(context.Managed):
    pass


class Child(Plain):
    pass


class WithDefault(context.DefaultManaged):
    pass


@context.define_context()
class Old:
    pass


def test_the_innermost_is_the_current_one() -> None:
    with Plain() as outer, WithDefault() as other:
        with Plain() as inner:
            assert Plain.current() is inner
        assert Plain.current() is outer and WithDefault.current() is other
    assert Plain.current(required=False) is None


def test_a_subclass_is_of_the_same_kind() -> None:
    with Child() as child:
        assert Plain.current() is child and Child.current() is child


def test_without_a_context() -> None:
    with pytest.raises(AssertionError, match="Plain is required but none is active"):
        Plain.current()
    assert WithDefault.current() is WithDefault.current()
    value = Child()
    assert Plain.current(value) is value
    with pytest.raises(AssertionError, match="Expected: Plain, got int"):
        Plain.current(3)


def test_a_thread_has_its_own() -> None:
    seen = []
    with Plain():
        thread = threading.Thread(target=lambda: seen.append(Plain.current(required=False)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_context_is_a_decorator_too() -> None:
    value = Plain()
    assert value(Plain.current)() is value
    assert Plain.current(required=False) is None


def test_the_older_form() -> None:
    with Old() as made:  # type: ignore[attr-defined]
        assert Old.current() is made  # type: ignore[attr-defined]


def test_an_error_ends_all_that_is_open_inside() -> None:
    with pytest.raises(KeyError), Plain():
        Plain().__enter__()
        raise KeyError
    assert Plain.current(required=False) is None
