"""Weights on the meta device, on the host, in files, and on the device during a forward."""
