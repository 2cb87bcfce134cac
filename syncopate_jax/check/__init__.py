"""What can be proved about a plan on a CPU: verification, execution in NumPy; imports no JAX."""
