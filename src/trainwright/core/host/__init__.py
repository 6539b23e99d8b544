"""The host: memory, folders and addresses, and output of the main process."""
