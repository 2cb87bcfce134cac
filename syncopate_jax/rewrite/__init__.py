"""Rewriting traced programs: collectives beside dots become fused operators."""
