"""Broken solvers and nets that the launcher must refuse before it starts a process."""

from tests.support.broken_jobs import V0_NET, Broken, net, solver, write

DEFINITIONS = (
    Broken(
        name="solver-field-typo",
        edit=(solver("base_lr:", "bace_lr:"),),
        says=r"solver\.prototxt:2:1: unknown field 'bace_lr' in SolverParameter; did you mean "
        r"'base_lr'\?",
    ),
    Broken(
        name="net-field-typo",
        edit=(net("{ num_output: 2 kernel_size", "{ num_output: 2 kernal_size"),),
        says=r"net\.prototxt:6:\d+: unknown field 'kernal_size' in ConvolutionParameter; did you "
        r"mean 'kernel_size'\?",
    ),
    Broken(
        name="enum-typo",
        edit=(net("pool: MAX", "pool: MAXX"),),
        says=r"net\.prototxt:7:\d+: .*MAXX.*MAX",
    ),
    Broken(
        name="brace-missing",
        edit=(net('top: "loss" }', 'top: "loss"'),),
        says=r"net\.prototxt:10:1: the '\{' of 'layer' in line 10 is not",
    ),
    Broken(
        name="text-for-a-number",
        edit=(net("num_output: 10", 'num_output: "ten"'),),
        says=r"net\.prototxt:9:\d+: .*num_output",
    ),
    Broken(
        name="number-for-text",
        edit=(solver('"fixed"', "3"),),
        says=r"solver\.prototxt:3:\d+: .*lr_policy",
    ),
    Broken(
        name="solver-missing",
        prepare=lambda f: (f / "solver.prototxt").unlink(),
        says=r"{}/solver\.prototxt",
    ),
    Broken(
        name="solver-is-a-folder", command=("train", "--solver={}"), says=r"{}.*(folder|directory)"
    ),
    Broken(
        name="solver-empty", prepare=write("solver.prototxt", ""), says=r"solver\.prototxt: .*empty"
    ),
    Broken(
        name="solver-not-text",
        prepare=write("solver.prototxt", b"\xff\xfe\x00"),
        says=r"solver\.prototxt.*text",
    ),
    Broken(
        name="net-not-named",
        edit=(solver('net: "net.prototxt"\n', ""),),
        says="no train net is named",
    ),
    Broken(
        name="net-missing",
        edit=(solver("net.prototxt", "nett.prototxt"),),
        says=r"solver\.prototxt:1: net: there is no net definition 'nett\.prototxt' \(searched: ",
    ),
    Broken(
        name="net-empty",
        prepare=write("net.prototxt", "# nothing\n"),
        says=r"net\.prototxt: .*empty",
    ),
    Broken(
        name="first-grammar",
        prepare=write("net.prototxt", V0_NET),
        says=r"net\.prototxt:2: unknown layer type 'convolution' of Caffe's first format \(V0\); "
        r"expected one of .*conv",
    ),
    Broken(
        name="net-without-loss",
        edit=(net("SoftmaxWithLoss", "Accuracy"),),
        says=r"net\.prototxt: the net has no loss to train on",
    ),
    Broken(
        name="blobs-that-nothing-fills",
        edit=(net('"Data"', '"Input"'),),
        says=r"net\.prototxt:2: layer 'data' \(Input\): nothing fills its blobs in a job; use a "
        r"layer that reads records, such as Data",
    ),
    Broken(
        name="layer-type-unknown",
        edit=(net('"InnerProduct"', '"InerProduct"'),),
        says=r"net\.prototxt:8: layer 'ip' .*'InerProduct'.*did you mean 'InnerProduct'\?",
    ),
    Broken(
        name="bottom-unknown",
        edit=(net('bottom: "pool" top: "ip"', 'bottom: "pol" top: "ip"'),),
        says=r"net\.prototxt:8: layer 'ip' \(InnerProduct\): unknown bottom 'pol'; did you mean "
        r"'pool'\?",
    ),
    Broken(
        name="bottom-only-in-the-other-phase",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net('top: "label"\n', 'top: "label" include { phase: TRAIN }\n'),
        ),
        says=r"net\.prototxt:5: layer 'conv' \(Convolution\): unknown bottom 'data'",
    ),
    Broken(
        name="phase-without-layers",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net("layer { name", "layer { include { phase: TRAIN } name"),
        ),
        says=r"net\.prototxt: the net has no layer for phase TEST",
    ),
    Broken(
        name="lr-policy-unknown",
        edit=(solver("fixed", "fixt"),),
        says=r"solver\.prototxt:3: lr_policy: .*fixed",
    ),
    Broken(
        name="momentum-out-of-range",
        edit=(solver("momentum: 0.9", "momentum: 1.5"),),
        says=r"solver\.prototxt:4: momentum: .*1\.5",
    ),
    Broken(
        name="rate-not-a-number",
        edit=(solver("base_lr: 0.01", "base_lr: nan"),),
        says=r"solver\.prototxt:2: base_lr",
    ),
    Broken(
        name="test-interval-missing",
        edit=(solver("max_iter", "test_iter: 1 max_iter"),),
        says=r"solver\.prototxt.*: test_interval: expected a positive number",
    ),
    Broken(
        name="test-iter-negative",
        edit=(solver("max_iter", "test_iter: -1 test_interval: 1 max_iter"),),
        says=r"solver\.prototxt:5: test_iter: ",
    ),
    Broken(
        name="solver-type-unknown",
        edit=(solver("max_iter", 'type: "SDG" max_iter'),),
        says=r"solver\.prototxt:5: type: unknown solver type 'SDG'; did you mean 'SGD'\?",
    ),
)
