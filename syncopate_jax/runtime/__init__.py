<<<<<<< HEAD
"""Calling fused kernels from jitted programs."""
=======
"""What runs a schedule: devices, fused calls inside user programs, operators."""
>>>>>>> substrate
