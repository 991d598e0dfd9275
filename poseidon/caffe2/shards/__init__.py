"""The shards of a run: the stores in which they meet, their rendezvous, and their common worlds."""
