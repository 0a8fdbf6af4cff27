"""Rounds of a step that repeat, such as micro-batches, as one loop (docs/design/loops.md).

    loop         a loop as the target of a node: its body, how often it runs, and what its operands and results are
    rounds       the rounds of a captured graph, and whether one repeats another
    reads        what the rounds of a loop read of themselves, of each other, and from outside
    roll         a captured graph in which equal rounds are one loop
    write        the program of a loop's body, whose carried values lie as it leaves them
    bound        a loop in a rank's code
"""
