"""A memory budget: which values a program keeps, and which it computes again where they are read."""
