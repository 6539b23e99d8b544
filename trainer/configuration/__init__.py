"""Checking and resolution of a Trainer's arguments."""
