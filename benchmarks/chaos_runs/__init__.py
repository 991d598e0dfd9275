"""Jobs to which something happens at a random moment, and how they end."""
