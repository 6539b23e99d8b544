"""Configurations: read, overridden, built into objects, saved."""
