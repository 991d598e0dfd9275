"""A tracer that records spans, and helpers to check them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_server.trace import Tracer, Track


@dataclass(frozen=True, slots=True)
class Span:
    """A recorded span."""

    track: Track
    kind: str
    name: str
    began_ns: int
    ended_ns: int
    facts: dict[str, int | float | str]


class Recorded(Tracer):
    """A recording tracer.

    Its clock advances by one at each reading, so that no two events have the same time.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: list[tuple[str, dict[str, int | float]]] = []
        self.closed = False
        self._now = 0

    def now(self) -> int:
        self._now += 1
        return self._now

    def span(
        self,
        track: Track,
        kind: str,
        name: str,
        began_ns: int,
        ended_ns: int | None = None,
        **facts: int | float | str,
    ) -> None:
        ended_ns = self.now() if ended_ns is None else ended_ns
        self.spans.append(Span(track, kind, name, began_ns, ended_ns, facts))

    def count(self, name: str, **values: int | float) -> None:
        self.counts.append((name, values))

    def close(self) -> None:
        self.closed = True

    def mark(self, kind: str, name: str) -> None:
        """Record a span of one instant."""
        self.span(Track.COMPUTE, kind, name, self.now())

    def names(self) -> list[tuple[str, str]]:
        """Return kind and name of all spans, in the order of their ends."""
        return [(span.kind, span.name) for span in self.spans]

    def inside(self) -> Iterator[tuple[Span, Span]]:
        """Yield each span with each other one of its track that contains it."""
        for inner in self.spans:
            for outer in self.spans:
                within = outer.began_ns <= inner.began_ns and inner.ended_ns <= outer.ended_ns
                if inner is not outer and inner.track is outer.track and within:
                    yield inner, outer


def nested(spans: Sequence[Span]) -> bool:
    """Return True if any two spans of a track are nested or disjoint."""
    for one in spans:
        for two in spans:
            crossing = one.began_ns < two.began_ns < one.ended_ns < two.ended_ns
            if one.track is two.track and crossing:
                return False
    return True
