"""A tracer that keeps what it is told, and questions about spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_server.trace import NoTrace, Track


@dataclass(frozen=True, slots=True)
class Span:
    """What a tracer was told."""

    track: Track
    kind: str
    name: str
    began_ns: int
    ended_ns: int
    facts: dict[str, int | float | str]


class Recorded(NoTrace):
    """Its clock moves by one at each look, so that no two things happen at once."""

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
        """A span of one instant."""
        self.span(Track.COMPUTE, kind, name, self.now())

    def names(self) -> list[tuple[str, str]]:
        """Kind and name of all spans, as they ended."""
        return [(span.kind, span.name) for span in self.spans]

    def inside(self) -> Iterator[tuple[Span, Span]]:
        """Each span with each other one of its track that holds it."""
        for inner in self.spans:
            for outer in self.spans:
                within = outer.began_ns <= inner.began_ns and inner.ended_ns <= outer.ended_ns
                if inner is not outer and inner.track is outer.track and within:
                    yield inner, outer


def nested(spans: Sequence[Span]) -> bool:
    """Whether any two spans of a track are nested or apart."""
    for one in spans:
        for two in spans:
            crossing = one.began_ns < two.began_ns < one.ended_ns < two.ended_ns
            if one.track is two.track and crossing:
                return False
    return True
