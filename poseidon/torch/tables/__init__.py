"""Embeddings whose rows are on the shards: `poseidon.Table`, and sparse embeddings of torch."""
