"""Flags as values: the fields of a job's options declare them, and the command line reads them.

Law: nothing here, and no module with such fields, imports torch when it is imported.
"""
