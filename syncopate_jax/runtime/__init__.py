"""Calling fused kernels from jitted programs."""
