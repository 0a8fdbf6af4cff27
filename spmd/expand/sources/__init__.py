"""Where a step keeps values in Python: what it can reach, by kinds, and what it has changed.

    kinds      a row for each kind of value: what is in it, whether that is as it was, and how to put it back
    reached    all that a step can reach, as it was before a capture
"""
