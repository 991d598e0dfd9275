"""Old grammars to today's, as Caffe's upgrade_proto does it.

Law: each upgrade is a question and a transformation; `driver` asks the questions in order. A
transformation takes a definition and gives a new one, and neither reads nor writes anything else.

Known: V1 (`layers { type: CONVOLUTION }`), transformation settings inside data_param, `input` and
`input_dim` of a net, and solver_type. V0 (`layers { layer { ... } }`) is known and refused.
"""
