"""How long the waits for each tensor have taken. Always on: it costs two looks at a clock for each wait."""

from __future__ import annotations

from poseidon.exchange.observe.observed import Call, Observer


class WaitTimes(Observer):
    """Adds up the time of `Exchange.wait` by tensor.

    Args:
        tensors: number of tensors.

    Attributes:
        iterations: finished iterations.
        waited_s: seconds that the waits for each tensor have taken, added up.
    """

    def __init__(self, tensors: int) -> None:
        self.iterations = 0
        self.waited_s = [0.0] * tensors

    def after(self, call: Call, index: int, began_ns: int, ended_ns: int) -> None:
        """See `Observer`."""
        if call is Call.WAIT:
            self.waited_s[index] += (ended_ns - began_ns) * 1e-9
        elif call is Call.FINISH:
            self.iterations += 1
