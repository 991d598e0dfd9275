"""A function of nets and records as a layer; so every operator is a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from poseidon.caffe2 import core, schema, scope, workspace
from poseidon.caffe2.layers.layers import ModelLayer, registered

log = logging.getLogger("poseidon.caffe2.layers")


@registered
class Functional(ModelLayer):
    """Calls `function(net, input_record, output_record, **kwargs)`.

    Args:
        input_record: a record, or a list of columns.
        output_names_or_num: names or the number of the outputs; a list, or a number other than 1,
            gives a structure. A record stands for itself.
        function: adds the operators.
        output_dtypes: the types of the outputs; by default they are inferred.
    """

    def __init__(
        self,
        model: Any,
        input_record: Any,
        output_names_or_num: Any = 1,
        function: Callable[..., Any] | None = None,
        name: str = "functional",
        output_dtypes: Any = None,
        tags: Any = None,
        **kwargs: Any,
    ) -> None:
        assert function is not None, "a Functional layer needs a function"
        super().__init__(model, name, schema.as_record(input_record), tags=tags, **kwargs)
        self._function = function
        if isinstance(output_names_or_num, schema.Field):
            self.output_schema = output_names_or_num.clone(keep_blobs=True)
            return
        several = isinstance(output_names_or_num, list) or (
            isinstance(output_names_or_num, int) and output_names_or_num != 1
        )
        if isinstance(output_names_or_num, int):
            wanted = schema.RawTuple(output_names_or_num)
        else:
            names = output_names_or_num if several else [output_names_or_num]
            wanted = schema.Struct(*[(each, np.void) for each in names])
        with scope.NameScope(self.name, reset=True):
            made = schema.NewRecord(model.net, wanted)
        self.output_schema = made if several else made[0]
        scalars = self.output_schema.all_scalars()
        if output_dtypes is None:
            self._infer(scalars)
            return
        given = output_dtypes if isinstance(output_dtypes, list) else [output_dtypes] * len(scalars)
        for scalar, dtype in zip(scalars, given, strict=True):
            scalar.set_type(dtype)

    def _infer(self, scalars: list[Any]) -> None:
        """Set the types of outputs as the operators make them of no examples."""
        net, unknown = core.Net("_type_inference"), []
        try:
            schema.InitEmptyRecord(net, self.input_record, enforce_types=True)
            self._function(net, self.input_record, self.output_schema, **self.kwargs)
            shapes, types = workspace.InferShapesAndTypes([net], {})
        except TypeError as error:
            log.warning("%s: types of outputs are not known: %s", self.name, error)
            return
        for scalar in scalars:
            blob = str(scalar())
            extents = shapes.get(blob)
            if extents is None or blob not in types or (extents and extents[0] != 0):
                unknown.append(blob)
            else:
                scalar.set_type((schema.dtype_for_core_type(types[blob]), tuple(extents[1:])))
        if unknown:
            log.warning("the types of %s are not known; give output_dtypes", ", ".join(unknown))

    def add_ops(self, net: Any) -> None:
        self._function(net, self.input_record, self.output_schema, **self.kwargs)
