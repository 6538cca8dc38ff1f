"""Who runs, on which blocks, in which rows: decisions only.

Nothing in this package imports torch, reads a clock or draws a random number, so a list of events between
iterations (submit, abort), the sampled tokens and the step failures describe a run completely. The rules are
numbered in ``model_sim/SPEC.md``; the code cites them as "rule 6".
"""
