"""The host: its memory, its folders and addresses, and which process speaks."""
