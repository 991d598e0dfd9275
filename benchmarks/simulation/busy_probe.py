"""A process that multiplies factors until it is killed: the work of another host.

python -m benchmarks.simulation.busy_probe
"""

from __future__ import annotations

from typing import NoReturn

import torch

from benchmarks.simulation.products import Products

ROWS = 128


def main() -> NoReturn:
    """Multiply factors; print a line at the start."""
    torch.set_num_threads(1)
    products = Products(ROWS)
    products.apply()
    print("busy", flush=True)
    while True:
        products.apply()


if __name__ == "__main__":
    main()
