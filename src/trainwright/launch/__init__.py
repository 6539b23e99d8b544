"""Starting a script on several processes from one command."""
