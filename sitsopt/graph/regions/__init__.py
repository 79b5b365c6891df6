"""Parts of a graph that are captured and replayed as one piece: planned here, and each plan checked by other code.

`schedule` orders work on streams and knows nothing of graphs; `facts` reads a graph; `partition`, `forks` and
`buffers` are the parts of a plan, `planner` joins them; `check` proves a plan against the graph.
"""
