"""The command line: `main` finds a command, `parsers` has its flags, the other modules its code."""
