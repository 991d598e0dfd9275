"""Data sources: databases of Caffe's Datum and lists of files, read and transformed to batches
in the background.

Law: which records a worker reads, and how they are cropped and mirrored, is a pure function of the
job's seed and the records' numbers in the job. Every reader can stop and resume at any batch.
"""

from poseidon.data.batches.partition import Share, share_for, source_for
from poseidon.data.batches.reader import BatchReader
from poseidon.data.batches.transform import Transform
from poseidon.data.databases.cursor import Cursor, open_cursor
from poseidon.data.databases.kinds import Backend

__all__ = [
    "Backend",
    "BatchReader",
    "Cursor",
    "Share",
    "Transform",
    "open_cursor",
    "share_for",
    "source_for",
]
