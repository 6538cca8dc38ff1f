"""Executable specification of the scheduler: SPEC.md says the rules, model.py is the same text as a program."""

from model_sim.model import Model, Refused

__all__ = ["Model", "Refused"]
