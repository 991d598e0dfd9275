"""The protocol of the store without I/O: messages and their frames, a shard, a worker's session."""
