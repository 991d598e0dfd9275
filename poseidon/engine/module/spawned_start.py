"""Imported at the start of each process that `multiprocessing` starts anew under a script of
`poseidon run --ddp`, before the script's own modules, which may import `init_process_group` by name.
"""

from poseidon.engine.module.spawned import replace_in_torch

replace_in_torch()
