"""Upgrades of old definition formats to the current one, as Caffe's upgrade_proto.

Law: each upgrade is a predicate and a transformation; `driver` applies them in order. A
transformation takes a definition and returns a new one, without side effects.

The formats: V0 (`layers { layer { type: "conv" } }`), V1 (`layers { type: CONVOLUTION }`),
transformation settings inside data_param, `input` and `input_dim` of a net, BatchNorm's three
`param` blocks, and solver_type.
"""
