"""What moves and when: boxes, operations, plans, schedules; imports no JAX."""
