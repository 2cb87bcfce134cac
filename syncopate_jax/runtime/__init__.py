"""What runs a schedule: devices, fused calls inside user programs, operators."""
