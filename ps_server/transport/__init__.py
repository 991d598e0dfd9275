"""Frames between named peers. Knows sockets, knows no message."""
