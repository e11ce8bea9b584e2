"""The mesh of ranks and the collectives on it."""
