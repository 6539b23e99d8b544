"""Models that are spread over devices, host and disk, and the hooks that bring their weights when they are needed."""
