"""Loggers for experiment trackers. A background thread sends what is logged."""
