"""Losses over classes that are shared out: a vocabulary on the ranks of an axis."""
