"""Nested blocks that build steps and nets, and the parts of tasks, readers and writers."""
