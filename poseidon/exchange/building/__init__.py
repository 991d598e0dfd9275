"""The builders of exchanges: of the server with its planes, of rounds of local steps; and what
they take and return.
"""
