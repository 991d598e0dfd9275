"""Pictures with labels, whole in memory: what data sets are made of before they are databases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Pictures and what they show.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N) uint8.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} pictures have {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)
