"""Jobs with checkpoints: what runs before, in and after each epoch, and the files in between."""

from poseidon.caffe2.checkpoint.managers import (
    CheckpointManager,
    MultiNodeCheckpointManager,
    db_name,
    get_ckpt_filename,
)
from poseidon.caffe2.checkpoint.runner import Job, JobRunner, UploadTaskGroupBuilder, epoch_limiter

__all__ = [
    "CheckpointManager",
    "Job",
    "JobRunner",
    "MultiNodeCheckpointManager",
    "UploadTaskGroupBuilder",
    "db_name",
    "epoch_limiter",
    "get_ckpt_filename",
]
