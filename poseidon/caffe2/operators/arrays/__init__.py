"""Making, reshaping, joining, indexing and copying arrays."""
