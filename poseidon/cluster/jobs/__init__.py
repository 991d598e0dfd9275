"""The jobs of a user: records of them, and listing and stopping them on this host and on others."""
