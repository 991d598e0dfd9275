"""`--exchange=auto`: a measurement of the schemes before training, and the choice that follows
from it.
"""
