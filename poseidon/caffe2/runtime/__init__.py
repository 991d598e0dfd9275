"""How nets run: blobs and workspaces, NetDefs as bound calls, plans, shape inference."""
