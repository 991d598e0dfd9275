"""Data sources: databases of Caffe's Datum and lists of files, read and transformed to batches
in the background.

Law: which records a worker reads, and how they are cropped and mirrored, is a pure function of the
job's seed and the records' numbers in the job. Every reader can stop and resume at any batch.
"""
