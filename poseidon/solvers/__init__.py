"""Learning-rate policies and the settings of a solver definition.

The update rules are in ps_server.
"""
