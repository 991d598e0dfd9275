"""Data sources: databases of Datum and lists of files, made into batches in the background.

Law: which records a worker reads, and how they are cropped and mirrored, is a pure function of the
job's seed and the records' numbers in the job. Every reader can stop and resume at any batch.
"""
