"""The examination of hosts and of the links between them: `poseidon doctor`."""
