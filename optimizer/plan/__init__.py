"""What can be decided. ``plan.py`` is the table; one module per category says what its column may hold."""

from optimizer.plan.plan import Plan

__all__ = ["Plan"]
