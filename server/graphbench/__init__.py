"""``python -m server graphbench``: do recorded graphs change an answer in a crowd, and what do they cost or save?"""
