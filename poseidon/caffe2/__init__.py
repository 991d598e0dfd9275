"""Caffe2's Python API on torch: nets of operators over blobs, built by calls and run from a NetDef.

    from poseidon.caffe2 import core, workspace

    net = core.Net("example")
    net.ConstantFill([], "x", shape=[2, 3], value=1.0)
    net.Relu("x", "y")
    workspace.RunNetOnce(net)
    workspace.FetchBlob("y")

- `proto`: the messages; `scope`, `core`: how nets are built; `workspace`: blobs and runs.
- `operators`: one small function each; `operators.registry` is the contract.
- `runtime`: how a NetDef is compiled and run.
- `shards`: how the processes of a run meet, and what they do together.
"""
