"""The decisions of a job. ``plan.py`` is the table; one module per category says what its row may hold.

Nothing is imported here, so that a goal (``optimizer/goal.py``) can read the pins alone.
"""
