"""Old grammars to today's, as Caffe's upgrade_proto does it.

Law: each upgrade is a question and a transformation; `driver` asks the questions in order. A
transformation takes a definition and gives a new one, and neither reads nor writes anything else.

Known: V0 (`layers { layer { type: "conv" } }`), V1 (`layers { type: CONVOLUTION }`), transformation settings inside
data_param, `input` and `input_dim` of a net, BatchNorm's three `param` blocks, and solver_type.
"""
