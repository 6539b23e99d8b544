"""Models that are distributed over devices, host memory and disk, and the hooks that load offloaded weights."""
