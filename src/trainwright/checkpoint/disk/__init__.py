"""Durable writes and checked reads of single files."""
