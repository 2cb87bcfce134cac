"""Pure rewrites from plan to plan, one a file; none changes what a plan computes."""
