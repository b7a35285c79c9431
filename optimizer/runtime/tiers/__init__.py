"""Keeps bytes off the device, and moves them: host, disk, remote store."""
