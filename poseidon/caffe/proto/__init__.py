"""Caffe's schema: prototxt parsing and printing, phase rules, upgrades of old formats, paths,
blobs.

Law: definitions are validated here. A definition that a function of this package returns has no
unknown field, no value of a wrong type and no missing required field. Every mistake of a user is a
`poseidon.errors.DefinitionError` with file, line and column.

- `text`: parses and prints prototxt; `diagnosis` explains syntax errors with
  the help of `tokens`, `values` and `names`.
- `definition`: a net or solver file with its path and line numbers, for later errors.
- `overrides`: solver fields from the command line.
- `shipped`: a solver and its nets as one text, for remote hosts.
- `phase`: which layers of a net belong to a phase, level and stage.
- `paths`: resolves the paths in a definition; `projects` creates project folders from the model
  zoo.
- `blob`: BlobProto to array and back.
- `upgrade`: conversion of old formats (V0, V1).
- `caffe_pb2`: generated from caffe.proto by `make proto`.
"""
