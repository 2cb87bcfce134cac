"""Local tiled kernels without communication, one a file, named noun_language."""
