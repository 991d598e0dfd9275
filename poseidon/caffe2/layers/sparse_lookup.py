"""Rows of a table by the ids of each example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import schema
from poseidon.caffe2.layers.layers import ModelLayer, registered

IdList = schema.List(np.int64)
"""Lists of ids, one for each example."""
IdScoreList = schema.Map(np.int64, np.float32)
"""Lists of ids with scores."""


@registered
class SparseLookup(ModelLayer):
    """Looks up a row for each id, and reduces the rows of each example.

    Args:
        input_record: an `IdList` or an `IdScoreList`; the metadata of its ids has the
            `categorical_limit`, the number of rows.
        inner_shape: the shape of a row.
        reducer: Sum, Mean, Max or Sqrt (the sum over the root of the number of ids);
            WeightedSum, by the scores; None: rows stay, one for each id.
        weight_init: (filler, arguments); by default uniform between -1 / sqrt(rows) and
            1 / sqrt(rows).
        weight_optim: see `LayerParameter`.
    """

    def __init__(
        self,
        model: Any,
        input_record: Any,
        inner_shape: int | Sequence[int],
        reducer: str,
        weight_init: Any = None,
        weight_optim: Any = None,
        name: str = "sparse_lookup",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, input_record, **kwargs)
        shape = [inner_shape] if isinstance(inner_shape, int) else list(inner_shape)
        legal = ["Sum", "Mean", "Max", "Sqrt", "None"]
        self.ids = "values"
        if not schema.equal_schemas(input_record, IdList):
            assert schema.equal_schemas(input_record, IdScoreList, check_field_types=False)
            self.ids = "values:keys"
            legal.append("WeightedSum")
        assert reducer in legal, f"{self.name}: reducer is {reducer}, expected {', '.join(legal)}"
        metadata = input_record[self.ids].metadata
        assert metadata is not None, f"{self.name}: the ids have no metadata with categorical_limit"
        rows = metadata.categorical_limit
        scale = math.sqrt(1 / rows)
        self.reducer = reducer
        self.w = self.create_param(
            "w",
            [rows, *shape],
            weight_init or ("UniformFill", {"min": -scale, "max": scale}),
            weight_optim,
        )
        self.output_schema = self.scalar(shape)

    def add_ops(self, net: Any) -> None:
        ids, lengths = self.input_record[self.ids](), self.input_record["lengths"]()
        outputs = self.output_schema.field_blobs()
        if self.reducer == "None":
            net.Gather([self.w, ids], outputs)
        elif self.reducer in ("Sum", "Mean", "Max"):
            getattr(net, f"SparseLengths{self.reducer}")([self.w, ids, lengths], outputs)
        else:
            if self.reducer == "Sqrt":
                weights = net.LengthsToWeights(lengths, net.NextScopedBlob("weights"), power=0.5)
            else:
                weights = self.input_record["values:values"]()
            net.SparseLengthsWeightedSum([self.w, weights, ids, lengths], outputs)
