"""All protocol code in one thread, against simulated time, networks, disks and processes."""
