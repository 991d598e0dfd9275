"""How the replicas' gradients meet: one contract, several ways."""
