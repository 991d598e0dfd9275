"""Opening channels to agents: in this process, over SSH, to a scheduler's tasks, through Ray."""
