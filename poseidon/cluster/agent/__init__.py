"""The agent: the process of a job on each remote host, which starts and stops the others there
for the launcher.
"""
