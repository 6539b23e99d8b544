"""Start of a script in several processes with one command."""
