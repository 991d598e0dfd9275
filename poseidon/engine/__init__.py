"""The process of one worker: training loops, tests, checkpoints, and its connection to the
launcher.
"""
