"""The workers of one machine: they sum their gradients in shared memory, and one of them speaks for all."""
