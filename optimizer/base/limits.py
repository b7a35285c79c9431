"""Limits that several parts of the program keep."""

from typing import Final

MAX_DEVICES: Final = 64
"""Most devices that one job runs on."""
