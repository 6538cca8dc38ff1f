"""Schedulers that are not ours, under the harness: see README.md beside this file."""
