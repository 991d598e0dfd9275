"""Caffe's schema: prototxt text in and out, phase rules, old grammars, paths, blobs.

Law: what leaves this room is checked. A definition that a function here returns has no unknown
field, no value of a wrong type and no missing required field, and every mistake of a user is a
`poseidon.errors.DefinitionError` with file, line and column. The lowest room: it imports only errors.

- `text`: prototxt to message and back; `diagnosis` explains what the parser refused; `tokens` scans.
- `definition`: a net or solver file with its place, so that later errors can name file and line.
- `phase`: which layers of a net belong to a phase, level and stage.
- `paths`: what a path inside a definition means.
- `blob`: BlobProto to array and back.
- `upgrade`: old grammars to today's.
- `caffe_pb2`: generated from caffe.proto by `make proto`.
"""
