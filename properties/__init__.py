"""The harness: one workload, run by the engine and by its specification side by side, compared after every iteration.

``python -m properties --help`` lists the commands; ``pytest properties -n auto`` is the hunt.
"""
