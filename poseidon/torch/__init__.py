"""Any torch module: what `poseidon.distribute` returns, and the process that runs a script."""
