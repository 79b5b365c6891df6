"""Regions at run time: costs for their planner, what becomes of a plan, the executor of CUDA graphs, and the judge
that looks at a step without knowing any plan."""
