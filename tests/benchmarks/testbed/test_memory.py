"""Measurements that do not fit are refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.memory import (
    COMPUTED_BYTES,
    check_memory,
    groups_that_fit,
    needed_bytes,
)
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.observe.plan.shapes import LayerShape

LARGE = TrainingSettings(
    layers=(LayerShape(name="fc", tensors=((10_000, 10_000),), work=1, fully_connected=True),),
    batch=1,
    compute_s=0.0,
)
MODEL = 4 * 10**8


def test_both_systems_need_several_copies_of_the_model_for_each_worker() -> None:
    for how in (DdpSettings(), PoseidonSettings()):
        assert 3 * 3 * MODEL < needed_bytes(LARGE, how, 3) < 3 * 10 * MODEL


def test_a_hook_needs_its_copies() -> None:
    plain = needed_bytes(LARGE, DdpSettings(), 3)
    assert needed_bytes(LARGE, DdpSettings(hook="fp16"), 3) == plain
    assert needed_bytes(LARGE, DdpSettings(hook="post-local:4"), 3) == plain + 3 * MODEL
    assert needed_bytes(LARGE, DdpSettings(hook="powersgd:4"), 3) == plain + 2 * 3 * MODEL
    assert needed_bytes(LARGE, DdpSettings(hook="diloco:4"), 3) == plain + 3 * 3 * MODEL


def test_one_process_needs_memory_once_and_a_computed_net_more() -> None:
    alone = needed_bytes(LARGE, DdpSettings(alone=True), 3)
    assert alone == needed_bytes(LARGE, DdpSettings(), 1)
    computed = replace(LARGE, computed="gpt-2m")
    assert needed_bytes(computed, DdpSettings(alone=True), 3) == alone + COMPUTED_BYTES


def test_what_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * MODEL))
    check_memory(LARGE, [DdpSettings()], 1)
    with pytest.raises(TestbedError, match=r"4 workers on this net need about .* fewer hosts"):
        check_memory(LARGE, [DdpSettings(), PoseidonSettings()], 4)


def test_codecs_and_local_steps_need_their_copies() -> None:
    plain = needed_bytes(LARGE, PoseidonSettings(), 3)
    assert needed_bytes(LARGE, PoseidonSettings(compress="int8"), 3) == plain + 2 * 3 * MODEL
    assert needed_bytes(LARGE, PoseidonSettings(local_steps=8), 3) == plain + 2 * 3 * MODEL


def test_jobs_form_groups_that_fit() -> None:
    hooks = [DdpSettings(hook=hook) for hook in ("fp16", "powersgd:1", "post-local:2")]
    one, two, three = (needed_bytes(LARGE, how, 2) for how in hooks)
    assert groups_that_fit(LARGE, hooks, 2, most_bytes=one + two) == [hooks[:2], hooks[2:]]
    assert groups_that_fit(LARGE, hooks, 2, most_bytes=one + two + three) == [hooks]
    assert groups_that_fit(LARGE, hooks, 2, most_bytes=0) == [[how] for how in hooks]
