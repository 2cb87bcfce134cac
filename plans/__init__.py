"""Plan templates, one algorithm a file, parameterised by ranks, shapes and split."""
