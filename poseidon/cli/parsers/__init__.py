"""What each command takes: its flags, its help and an example; importing these
modules imports neither torch nor numpy.
"""
