"""Passes over programs and bound graphs. A pass never changes the numbers that a program computes."""
