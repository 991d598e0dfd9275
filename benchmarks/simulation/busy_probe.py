"""Products of factors, one after the other, in a process of its own, until it is ended: the work of another host.

python -m benchmarks.simulation.busy_probe
"""

from __future__ import annotations

from typing import NoReturn

import torch

from benchmarks.simulation.products import Products

ROWS = 128


def main() -> NoReturn:
    """Work; says so once it has begun."""
    torch.set_num_threads(1)
    products = Products(ROWS)
    products.apply()
    print("busy", flush=True)
    while True:
        products.apply()


if __name__ == "__main__":
    main()
