"""Damaged and forged files, killed processes, and arguments that no honest program gives."""
