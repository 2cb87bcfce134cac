"""Ready operators, with gradients: one a file."""
