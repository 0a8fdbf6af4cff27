"""A value and a function that steps of test_changes import when they run."""

RATE = 2.0


def scaled(x):
    return x * RATE
