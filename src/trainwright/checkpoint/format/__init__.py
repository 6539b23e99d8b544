"""The format on disk: what a checkpoint's folder holds, written and read."""
