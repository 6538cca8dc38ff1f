"""``python -m server bench``: drives an OpenAI-compatible server, ours or another, and says how fast it answers."""
