"""Records in, batches out: databases of Caffe's Datum, read ahead of training.

Law: which record a worker sees, and how it is cropped and mirrored, is a pure function of the job's seed and the
record's place in the job; everything here can be stopped and taken up again at any batch.
"""

from poseidon.data.batches.partition import Share, share_for, source_for
from poseidon.data.batches.reader import BatchReader
from poseidon.data.batches.transform import Transform
from poseidon.data.databases.cursor import Cursor, open_cursor
from poseidon.data.databases.kinds import Backend

__all__ = ["Backend", "BatchReader", "Cursor", "Share", "Transform", "open_cursor", "share_for", "source_for"]
