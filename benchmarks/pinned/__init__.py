"""Ways of training compound models, compared on the smallest honest cluster: two processes, each pinned to one core.

`python -m benchmarks.pinned` starts every way (a pair of processes that compiles, warms up and then waits), lets them take turns, so that
whatever else the machine does hits all alike, and writes a table and a picture to docs/results.md.
"""
