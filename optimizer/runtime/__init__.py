"""Carries out a plan: one module per category of memory, beside the loop, the meter and the checkpoints."""
