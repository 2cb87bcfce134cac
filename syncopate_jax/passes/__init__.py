"""From a plan to a schedule, by pure functions: ``expand_collectives`` and ``split_chunks`` rewrite
plans and keep what they compute, ``schedule_plan`` puts the others together."""
