"""Data sets made ready: downloaded, converted, and divided among clients."""
