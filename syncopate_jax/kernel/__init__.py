"""What is computed: tile spaces, what a tile reads and writes, and local kernels."""
