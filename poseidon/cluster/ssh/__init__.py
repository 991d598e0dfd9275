"""SSH: connections to the hosts of a machinefile, programs and files over them."""
