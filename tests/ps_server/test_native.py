"""The compiled codecs and rules: the same bits as torch's code, at every level of instructions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ps_server import Rule, native, rules
from ps_server.codecs.base import SEGMENT_ELEMENTS, Array, Coder, Encoded, Key
from ps_server.codecs.registry import codec_of
from ps_server.codecs.segments import SegmentCodec
from ps_server.native.compile import compile_codecs
from ps_server.protocol.settings import Regularization, RuleKind
from tests.support import needs

CODECS = (
    "int8",
    "int4",
    "sign",
    "topk:0.3",
    "topk:0.01",
    "topk:0.0001",
    "randomk:0.5",
    "randomk:0.01",
)
SIZES = (1, 2, 7, 63, 64, 65, 255, 256, 257, 1_001, *(SEGMENT_ELEMENTS + i for i in (-1, 0, 1)))
LARGE = 2 * SEGMENT_ELEMENTS + 777
KEY = Key(table=3, segment=5, clock=7)
WORKERS = 3
Make = Callable[[int, int], Array]
ONE_PASS = (
    Rule(momentum=0.9),
    Rule(momentum=0.0, decay=1e-3),
    Rule(kind=RuleKind.TORCH_SGD, momentum=0.9, decay=0.1, dampening=0.3),
    Rule(kind=RuleKind.TORCH_ADAM, momentum=0.9, decay=0.1, delta=1e-8),
    Rule(kind=RuleKind.TORCH_ADAM, momentum=0.6, momentum2=0.9),
    Rule(kind=RuleKind.ADAMW, momentum=0.9, decay=0.1, delta=1e-8),
    Rule(kind=RuleKind.ADAMW, momentum=0.9, momentum2=0.95),
)
SEVERAL_PASSES = (
    Rule(momentum=0.9, decay=0.1, regularization=Regularization.L1),
    Rule(kind=RuleKind.TORCH_SGD),
    Rule(kind=RuleKind.TORCH_SGD, momentum=0.9, nesterov=True),
    Rule(kind=RuleKind.NESTEROV, momentum=0.9),
    Rule(kind=RuleKind.ADAMW, momentum=0.5),
    Rule(kind=RuleKind.ADAM, momentum=0.9),
)


def random(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def ties(size: int, seed: int) -> Array:
    return np.round(random(size, seed))


def mostly_zero(size: int, seed: int) -> Array:
    return np.where(random(size, seed) > 2.5, random(size, seed + 1), np.float32(-0.0))


def constant(size: int, seed: int) -> Array:
    return np.full(size, -1.5 if seed % 2 else 0.0, np.float32)


def exponents(size: int, seed: int) -> Array:
    powers = np.random.default_rng(seed).integers(-149, 120, size)
    return np.ldexp(random(size, seed), powers).astype(np.float32)


def tiny(size: int, seed: int) -> Array:
    return random(size, seed) * np.float32(2**-126)


def huge(size: int, seed: int) -> Array:
    return np.sign(random(size, seed)) * np.finfo(np.float32).max


def not_finite(size: int, seed: int) -> Array:
    numbers = random(size, seed)
    at = np.random.default_rng(seed).integers(0, size, 3)
    numbers[at] = np.array([np.nan, np.inf, -np.inf], np.float32)
    return numbers


NUMBERS = (random, ties, mostly_zero, constant, exponents, tiny, huge, not_finite)


def shifted(array: np.ndarray, shift: int) -> np.ndarray:
    """A copy that begins `shift` elements after the start of its memory."""
    moved = np.zeros(array.size + shift, array.dtype)[shift:]
    moved[:] = array
    return moved


def results(codec: Coder, make: Make, size: int, shift: int = 0) -> list[bytes]:
    """What every operation writes: encoded bytes, and numbers with one NaN for all."""
    left, own = shifted(make(size, 1), shift), shifted(make(size, 2), shift)
    pushes: list[Encoded] = []
    written: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for worker in range(WORKERS):
            out = shifted(np.full(codec.size(size), 0xEE, np.uint8), shift)
            codec.compress(left, shifted(make(size, 10 + worker), shift), out, KEY)
            pushes.append(out)
            written += [out, left.copy()]
        for worker in range(2):
            out = shifted(np.full(codec.size(size), 0xEE, np.uint8), shift)
            codec.follow(own, shifted(make(size, 20 + worker), shift), out, KEY)
            written += [out, own.copy()]
        for encoded in pushes:
            codec.check(encoded, size)
            codec.add(own, encoded, KEY)
        mean, alone = np.full((2, size), 7, np.float32)
        codec.average(mean, pushes, KEY)
        codec.average(alone, pushes[:1], KEY)
    written += [own, mean, alone]
    whole = isinstance(
        codec.codec, SegmentCodec
    )  # their encoded bytes are elements, and small numbers
    return [
        one_nan(array.view(np.float32)).tobytes() if array.dtype == np.float32 or whole
        else array.tobytes()
        for array in (array.copy() for array in written)
    ]  # fmt: skip


def one_nan(array: np.ndarray) -> np.ndarray:
    """The array, with the same bits for every NaN: its payload is free."""
    return np.where(np.isnan(array), np.float32(np.nan), array)


def codec(name: str, library: native.Library | None) -> Coder:
    return Coder(codec_of(name), library)


@pytest.fixture
def libraries() -> list[native.Library]:
    """The compiled code at each level that this processor has."""
    needs.require("native")
    found = [native.load(level) for level in native.Level]
    assert all(found)
    return [one for one, level in zip(found, native.Level, strict=True) if one.level is level]


def results_of_all(name: str, library: native.Library | None, make: Make) -> list[bytes]:
    sizes = SIZES if make is random else (1, 257, LARGE)
    return [part for size in sizes for part in results(codec(name, library), make, size)]


def flushing(denormals: bool) -> ThreadPoolExecutor:
    """A thread that computes without denormal numbers, or with them: the mode is a property of
    the thread.
    """
    return ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(denormals,))


@pytest.mark.parametrize(
    ("name", "flush"),
    [
        pytest.param(name, flush, marks=() if (number + flush) % 2 else pytest.mark.thorough)
        for number, name in enumerate(CODECS)
        for flush in (False, True)
    ],
)
def test_compiled_code_has_the_bits_of_torch(
    libraries: list[native.Library], name: str, flush: bool
) -> None:
    with flushing(flush) as thread:
        for make in NUMBERS:
            expected = thread.submit(results_of_all, name, None, make).result()
            for library in libraries:
                found = thread.submit(results_of_all, name, library, make).result()
                assert found == expected, (make.__name__, library.level.name)


@pytest.mark.parametrize("name", CODECS)
def test_compiled_code_has_these_bits_at_every_address_and_in_every_thread(
    libraries: list[native.Library], name: str
) -> None:
    expected = results(codec(name, None), random, LARGE)
    with ThreadPoolExecutor(4) as pool:
        found = [  # floats move by 4 bytes, encoded ones by 1
            pool.submit(results, codec(name, library), random, LARGE, shift)
            for library in libraries
            for shift in range(4)
        ]
        assert all(one.result() == expected for one in found)


@pytest.mark.parametrize("name", CODECS)
def test_arrays_with_gaps_are_left_to_torch(name: str, libraries: list[native.Library]) -> None:
    exact, gaps, left = random(600, 1), np.zeros((600, 2), np.float32)[:, 0], np.zeros(600)
    out, expected = (np.zeros(codec(name, None).size(600), np.uint8) for _ in range(2))
    codec(name, libraries[0]).compress(gaps, exact, out, KEY)
    codec(name, None).compress(left := left.astype(np.float32), exact, expected, KEY)
    assert (out.tobytes(), gaps.tobytes()) == (expected.tobytes(), left.tobytes())


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[native.Library | None], None]]:
    """Sets the compiled code of this process; None: torch computes."""

    def use(library: native.Library | None) -> None:
        monkeypatch.setattr(native, "LIBRARY", library)
        rules._one_pass_library.cache_clear()

    yield use
    rules._one_pass_library.cache_clear()


def updated(make: Make, size: int, shift: int = 0) -> list[bytes]:
    """What three updates by each rule of one pass write, and a mean, with one NaN for all."""
    written = []

    def state(rule: Rule) -> tuple[Tensor, list[Tensor]]:
        count = 1 + rules.history_count(rule.kind)
        made = [torch.from_numpy(shifted(make(size, seed), shift)) for seed in range(1, 1 + count)]
        return made[0], [tensor.abs_() for tensor in made[1:]]

    for rule in ONE_PASS:
        value, history = state(rule)
        for step in range(3):
            gradient = torch.from_numpy(shifted(make(size, 10 + step), shift))
            rules.update(rule, gradient, history, value, rate=0.3, step=step)
        written += [value, *history]
    halves = (torch.from_numpy(shifted(make(size, seed), shift)) for seed in (3, 4))
    mean = rules.Halves(*halves, 3)
    assert mean.right is not None
    for rule in ONE_PASS:
        value, history = state(rule)
        if not rules.update_in_one_pass(rule, mean, history, value, rate=0.3, step=1):
            gradient = torch.empty(size)
            mean.write_mean(gradient)
            rules.update(rule, gradient, history, value, rate=0.3, step=1)
        written += [value, *history]
    elsewhere, again, right = torch.empty(size), torch.empty(size), mean.right.clone()
    mean.write_mean(elsewhere)
    mean.write_mean(mean.right, again)
    rules.Halves(mean.left, right, 3).write_mean(mean.left)
    written += [elsewhere, mean.right, again, mean.left]
    return [one_nan(tensor.numpy()).tobytes() for tensor in written]


def is_one_pass(rule: Rule) -> bool:
    value, gradient, *history = torch.ones(2 + rules.history_count(rule.kind), 4)
    return rules.update_in_one_pass(rule, rules.Halves(gradient), history, value, rate=0.1, step=0)


@pytest.mark.parametrize("flush", [False, True], ids=["with denormals", "without denormals"])
def test_compiled_rules_have_the_bits_of_torch(
    libraries: list[native.Library], use: Callable[[native.Library | None], None], flush: bool
) -> None:
    cases = [
        (make, size, shift) for make in NUMBERS for size, shift in ((1, 0), (257, 1), (4_099, 3))
    ]
    with flushing(flush) as thread:
        use(None)
        assert not any(map(is_one_pass, ONE_PASS))
        expected = [thread.submit(updated, *case).result() for case in cases]
        for library in libraries:
            use(library)
            found = [thread.submit(updated, *case).result() for case in cases]
            assert found == expected, library.level.name


def test_only_rules_that_are_compiled_are_one_pass(
    libraries: list[native.Library], use: Callable[[native.Library | None], None]
) -> None:
    use(libraries[-1])
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert all(map(is_one_pass, ONE_PASS))
    assert not any(map(is_one_pass, SEVERAL_PASSES))


def test_a_processor_with_other_bits_leaves_rules_to_torch(
    libraries: list[native.Library],
    use: Callable[[native.Library | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries[0], "update", lambda *_: None)
    use(libraries[0])
    assert not any(map(is_one_pass, ONE_PASS))


def digests(library: native.Library | None) -> Iterator[str]:
    with flushing(True) as thread:
        for name in CODECS[::2]:
            for make in (random, exponents):
                written = thread.submit(results, codec(name, library), make, SIZES[-1]).result()
                yield hashlib.sha256(b"".join(written)).hexdigest()


def test_limited_instructions_change_no_bit() -> None:
    """Another process has torch and numpy without vectors of more than 128 bits, and the compiled
    code at its lowest level.
    """
    program = (
        "from tests.ps_server.test_native import digests, native\n"
        "for library in (None, native.load(native.Level.PLAIN)):\n"
        "    print(*digests(library))"
    )
    limits = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2], env={**os.environ, **limits}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    expected = list(digests(None))
    assert [line.split() for line in done.stdout.splitlines()] == [expected, expected]


def test_a_library_of_another_text_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs.require("native")
    changed = tmp_path / "codecs.c"
    changed.write_bytes(native.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(native, "SOURCES", [changed, *native.SOURCES[1:]])
    assert native.load() is None  # of another text
    monkeypatch.setattr(native, "LIBRARY_FILE", tmp_path / "codecs.so")
    assert native.load() is None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "no C compiler was found"),
        ("false", "non-zero exit status 1"),
        ("absent-cc", "absent-cc"),
    ],
)
def test_a_missing_compiler_is_one_line_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    compiler: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "codecs.so").write_text("from before")
    assert not compile_codecs(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Poseidon's codecs are not compiled: ")
    assert reason in line
    assert not list(tmp_path.iterdir())
