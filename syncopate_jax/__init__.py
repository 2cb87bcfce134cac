"""Fine-grained overlap of computation and communication inside JAX kernels."""
