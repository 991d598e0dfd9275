"""Starting, watching and stopping the processes of a job, on the machines of a machinefile."""
