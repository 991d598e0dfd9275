"""The command line: one file a command; each parses flags and calls one function."""
