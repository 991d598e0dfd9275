"""Records in, batches out: databases of Caffe's Datum, read ahead of training.

Law: which record a worker sees, and how it is cropped and mirrored, is a pure function of the job's seed and the
record's place in the job; everything here can be stopped and taken up again at any batch.
"""

from poseidon.data.cursor import Cursor, open_cursor
from poseidon.data.database import Backend
from poseidon.data.partition import Share, share_for, source_for
from poseidon.data.reader import BatchReader
from poseidon.data.transform import Transform

__all__ = ["Backend", "BatchReader", "Cursor", "Share", "Transform", "open_cursor", "share_for", "source_for"]
