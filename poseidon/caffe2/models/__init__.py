"""Builders of whole networks, and trained models as modules.

    from poseidon.caffe2.models import squeezenet  # after models.download

    workspace.Predictor(squeezenet.init_net, squeezenet.predict_net)

Law: a module of this package comes before a trained model of its name. The folder of trained models
holds data: no code of it is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from poseidon.caffe2.models import download


class _TrainedModels(MetaPathFinder, Loader):
    """Finds the trained models in their folder as modules of this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        folder = download.models_folder() / name
        if download.is_model(folder):
            return ModuleSpec(fullname, self, origin=str(folder))
        if name in download.ZOO:
            raise ImportError(
                f"the trained model {name} is not in {folder.parent}; download it with `poseidon "
                f"python -m caffe2.python.models.download -i {name}`",
                name=fullname,
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give a module the nets of its model."""
        name = module.__name__.rpartition(".")[2]
        init_net, predict_net, _ = download.read_model(download.models_folder() / name)
        module.__dict__.update(init_net=init_net, predict_net=predict_net)


sys.meta_path.append(_TrainedModels())
