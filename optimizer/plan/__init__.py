"""What can be decided. ``plan.py`` is the table; one module per category says what its column may hold.

Nothing is imported here: a goal (``optimizer/workload.py``) pins single decisions, and the table knows of workloads.
"""
