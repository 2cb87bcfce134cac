"""Rewriting of annotated Triton kernels, source to source, on their syntax trees."""
