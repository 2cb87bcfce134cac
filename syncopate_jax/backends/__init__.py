"""How chunks are moved: one realisation of a schedule a file."""
