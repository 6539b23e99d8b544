"""Weights without memory, on the host, in files and in slots on a device."""
