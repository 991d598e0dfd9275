"""Names of the calls in which a worker waits for others: workers report them, the launcher reads
them. Other names are those of methods of a group.
"""

DISTRIBUTE = "distribute"
"""It waits until all have joined."""
STEP = "step"
"""It ends an iteration."""
MEANS = "means"
"""It waits for the means of the iteration that it has ended."""
LEAVING = "close"
"""It waits at the end of its `with` block."""
VALUES = "values"
"""It uses values, and waits for them until all have ended the steps of that module that it has."""
OF_TORCH = "torch.distributed."
"""How the names of calls begin that loops do not make."""
