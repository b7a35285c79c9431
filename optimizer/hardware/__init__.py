"""Machines, their devices and links, and how fast they were measured to be."""
