"""Measures the search: against trying every plan, against real runs of alternatives, and how long it takes."""
