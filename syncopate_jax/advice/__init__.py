"""What a model would gain from tensor parallelism on a topology, by the simulator."""
