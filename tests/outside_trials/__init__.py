"""Behaviour that trials from outside have found missing, by the numbers of their rows."""
