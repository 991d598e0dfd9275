"""A live page of jobs, from their output folders: `poseidon dashboard`."""
