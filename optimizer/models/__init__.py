"""Reads what is submitted: a config.json becomes a ModelSpec without torch; build.py alone turns it into tensors."""
