"""Poseidon on one GPU: correctness of the CUDA paths, and the speed of one worker."""
