"""Files of snapshots and checkpoints: their names, checksums, rotation and writing."""
