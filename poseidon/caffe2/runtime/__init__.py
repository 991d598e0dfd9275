"""How nets run: blobs and workspaces, the compilation of a NetDef to bound calls, plans, shape
inference.
"""
