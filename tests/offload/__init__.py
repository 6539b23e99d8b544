"""Models larger than the machine."""
