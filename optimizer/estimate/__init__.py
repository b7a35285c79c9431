"""Prices a plan, in bytes over time per tier and category, and in milliseconds per lane."""
