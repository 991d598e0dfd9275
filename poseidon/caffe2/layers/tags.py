"""Tags of layers: in which nets a layer is, and what a script notes about it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator

from poseidon.caffe2.context import DefaultManaged


class TagContext(DefaultManaged):
    """The tags that new layers get."""

    def __init__(self, tags: Sequence[str] | None = None) -> None:
        self.tags = list(tags or [])

    def add_tags(self, tags: Sequence[str]) -> None:
        self.tags.extend(tags)

    def remove_tags(self, tags: Sequence[str]) -> None:
        """Remove the tags that were added last."""
        assert self.tags[len(self.tags) - len(tags) :] == list(tags)
        del self.tags[len(self.tags) - len(tags) :]


class Tags(ContextDecorator):
    """Tags for the layers that are made inside a `with` block, or inside calls of a function.

    Only those that exclude layers from nets have a meaning here.
    """

    EXCLUDE_FROM_TRAIN = "exclude_from_train"
    EXCLUDE_FROM_EVAL = "exclude_from_eval"
    EXCLUDE_FROM_PREDICTION = "exclude_from_prediction"
    EXCLUDE_FROM_ACCUMULATE_PRED = "exclude_from_accumulate_pred"
    PREPROCESSING = "preprocessing"
    HANDLE_AS_SPARSE_LAYER = "handle_as_sparse_layer"
    PREFER_GPU = "prefer_gpu"
    CPU_ONLY = "cpu_only"
    LOCAL = "local"
    SPARSE_SHARDED = "sparse_sharded"
    SPARSE_DONT_SHARD = "sparse_dont_shard"
    COMPONENT = "component:"
    PIPELINE = "pipeline:"
    HOGWILD_DENSE = "hogwild_dense"
    EXTRA_INFO = "extra_info:"
    EMPTY_TAG = "empty_tag"
    PREDICTION_SCHEMA = "prediction_schema"
    FEATURE_TRANSFORM = "feature_transform"
    FEATURE_TRANSFORM_SCHEMA = "feature_transform_schema"
    DT_TAGS = (SPARSE_SHARDED, SPARSE_DONT_SHARD, COMPONENT, HOGWILD_DENSE)
    TRAIN_ONLY = (EXCLUDE_FROM_PREDICTION, EXCLUDE_FROM_EVAL, EXCLUDE_FROM_ACCUMULATE_PRED)
    EVAL_ONLY = (EXCLUDE_FROM_PREDICTION, EXCLUDE_FROM_TRAIN, EXCLUDE_FROM_ACCUMULATE_PRED)
    PREDICTION_ONLY = (EXCLUDE_FROM_TRAIN, EXCLUDE_FROM_EVAL, EXCLUDE_FROM_ACCUMULATE_PRED)

    def __init__(self, tags: str | Sequence[str]) -> None:
        self.tags = [tags] if isinstance(tags, str) else list(tags)

    def __enter__(self) -> Tags:
        TagContext.current().add_tags(self.tags)
        return self

    def __exit__(self, *_: object) -> None:
        TagContext.current().remove_tags(self.tags)
