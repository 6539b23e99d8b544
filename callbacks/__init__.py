"""What happens besides training: the Callback base, the table of its events and the ready-made callbacks."""
