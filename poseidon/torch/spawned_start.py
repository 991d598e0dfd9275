"""Replaces `init_process_group` when it is imported.

Each process that `multiprocessing` starts by "spawn" or "forkserver" under `poseidon run --ddp`
imports it first. The script's own modules may import `init_process_group` by name.
"""

from poseidon.torch.spawned import replace_in_torch

replace_in_torch()
