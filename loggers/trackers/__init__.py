"""Loggers for experiment trackers. A background thread sends logged values."""
