"""Databases of records: LMDB and LevelDB, read by cursors and written in batches."""
