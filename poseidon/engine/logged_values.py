"""What a script logs: checks it, and sends it to the launcher, which records means over workers.

    group.log(loss=loss, accuracy=0.7)

Laws:
* Logging does not wait, neither for other workers nor for a device: the value of a tensor on a
  device is copied while the script continues, and is sent once the copy has ended.
* A worker sends a name's value for each of its first 1024 iterations, then of every second one up
  to 2048, of every fourth up to 4096, and so on, and the last one at its end. Which ones depends on
  their number alone, so all workers send the same ones.
"""

from __future__ import annotations

import math
import numbers
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from poseidon.errors import UsageError
from poseidon.exchange.device import DONE, Event, device_of

Value = float | Tensor
MOST_NAMES = 100
_NAME = re.compile(r"[A-Za-z_][\w./:-]{0,99}", re.ASCII)
_POINTS_BITS = 10
"""Twice the points of a doubling of the iterations, as a power of two."""


def check(iteration: int, values: Mapping[str, Value]) -> None:
    """Check what a script logs.

    Args:
        iteration: 0 or more.
        values: real numbers and tensors of one element, by name.

    Raises:
        UsageError: a name, a value or the iteration cannot be logged.
    """
    if not isinstance(iteration, int) or iteration < 0:
        raise UsageError(f"log() was given iteration={iteration!r}; expected 0, 1, 2, ...")
    for name, value in values.items():
        if not is_name(name):
            raise UsageError(
                f"log() was given the name {name[:120]!r}; expected up to 100 letters, digits and "
                "_ . / : - of ASCII, beginning with a letter or _"
            )
        if not _is_value(value):
            given = type(value).__name__
            if isinstance(value, Tensor):
                given = f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
            raise UsageError(
                f"log() was given {name}={given}; expected a real number, or a tensor of one "
                f"element, such as {name}.mean()"
            )


def is_name(name: object) -> bool:
    """Return whether a value can be logged under this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _is_value(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


@dataclass(slots=True)
class _Count:
    """The iterations of a name so far, and the values of the last one."""

    iterations: int = 0
    last: int = -1
    values: int = 0

    def is_due(self, iteration: int) -> bool:
        """Count a value; return whether it is to be sent."""
        if iteration != self.last:
            self.last, self.values = iteration, 0
            self.iterations += 1
        self.values += 1
        return _is_sent(self.iterations) and _is_sent(self.values)


def _is_sent(number: int) -> bool:
    """Return whether the value with a number from 1 is sent."""
    before = number - 1
    return before % (1 << max(0, before.bit_length() - _POINTS_BITS)) == 0


class LoggedValues:
    """Sends what one worker logs in one start of its job.

    Args:
        send: an event with fields to the launcher.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._counts: dict[str, _Count] = {}
        self._left_out: dict[str, tuple[int, Value]] = {}
        """The last value of each name, unless it was sent."""
        self._waiting: deque[tuple[int, dict[str, tuple[Value, Event]]]] = deque()
        self._lock = threading.Lock()

    def log(self, iteration: int, values: Mapping[str, Value]) -> None:
        """Send the values of an iteration that are to be sent; see `check`.

        Raises:
            UsageError: one cannot be logged, or there are too many names.
        """
        check(iteration, values)
        with self._lock:
            for name in values:
                if name not in self._counts and len(self._counts) == MOST_NAMES:
                    raise UsageError(
                        f"log() takes at most {MOST_NAMES} names; '{name}' is too many"
                    )
                self._counts.setdefault(name, _Count())
            due = {}
            for name, value in values.items():
                if self._counts[name].is_due(iteration):
                    due[name] = value
                    self._left_out.pop(name, None)
                else:  # the script may change a tensor
                    own = value.detach().clone() if isinstance(value, Tensor) else value
                    self._left_out[name] = iteration, own
            self._copy(iteration, due)
        self.send_copied()

    def send_copied(self) -> None:
        """Send the values that are on the host by now."""
        self._send_waiting(wait=False)

    def close(self) -> None:
        """Send all values that wait and the last one of each name, and wait for them."""
        with suppress(RuntimeError):  # a device that has failed: the script has raised its error
            with self._lock:
                last: dict[int, dict[str, Value]] = {}
                for name, (iteration, value) in self._left_out.items():
                    last.setdefault(iteration, {})[name] = value
                self._left_out.clear()
                for iteration, values in last.items():
                    self._copy(iteration, values)
            self._send_waiting(wait=True)

    def _copy(self, iteration: int, values: Mapping[str, Value]) -> None:
        """Begin to copy values to the host, from where they are sent."""
        if values:
            copied = {name: _copied(value) for name, value in values.items()}
            self._waiting.append((iteration, copied))

    def _send_waiting(self, *, wait: bool) -> None:
        with self._lock:
            while self._waiting:
                iteration, copied = self._waiting[0]
                for _, copy in copied.values():
                    if wait:
                        copy.synchronize()
                    elif not copy.query():
                        return
                self._waiting.popleft()
                found = {name: _number(value) for name, (value, _) in copied.items()}
                self._send("logged", iteration=iteration, values=found)


def _copied(value: Value) -> tuple[Value, Event]:
    """Return a value on the host, and the event after which it is there."""
    if not isinstance(value, Tensor):
        return value, DONE
    device = device_of(value.device)
    if device.is_host:
        return value.item(), DONE
    memory = device.host_memory(*value.shape, dtype=value.dtype)
    memory.copy_(value.detach(), non_blocking=True)
    return memory, device.event()


def _number(value: Value) -> float | None:
    with suppress(OverflowError):  # a whole number
        number = float(value)
        return number if math.isfinite(number) else None
    return None
