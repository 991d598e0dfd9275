"""What part of the model the shards of each machine carry, so that every link carries the same.

With n working machines, b of which have shards too, and k that only serve, a part w of the model on each of the b and
s on each of the k, the bytes that an iteration brings to a link are, in models (sent and received),

    worker and shards  2 (1 + w (n - 2))       worker alone  2       shards alone  2 n s

and b w + k s = 1. The largest of them is least where the first and the last are equal:

    w = (n - k) / (b n + k (n - 2))            s = (b + n - 2) / (b n + k (n - 2))

which with b = n is BytePS's optimum, w = (n - k) / (n n + k n - 2 k), s = 2 (n - 1) / (n n + k n - 2 k) (OSDI 2020,
section 4.1). With k >= n the servers alone suffice, and w = 0.
"""

from __future__ import annotations

from math import gcd


def best_shares(workers: int, servers: int, *, sharing: int | None = None) -> tuple[int, int]:
    """The relative load of a working machine's shards and of a serving machine's, in smallest whole numbers.

    Args:
        workers: n, machines with workers; at least 1.
        servers: k, machines with shards only.
        sharing: b, those working machines that have shards too; None: all.

    Returns:
        The two shares; 0 where such a machine is to have no shards, or there is no such machine.
    """
    both = workers if sharing is None else sharing
    if servers == 0:
        return (1, 0) if both else (0, 0)
    if servers >= workers or both == 0:
        return (0, 1)
    working, serving = workers - servers, both + workers - 2
    divisor = gcd(working, serving)
    return (working // divisor, serving // divisor)
