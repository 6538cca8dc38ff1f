"""``python -m server bench --offline``: this engine beside others, each in a process of its own, in interleaved rounds."""
