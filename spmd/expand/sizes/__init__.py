"""Sizes as symbols: one capture of a step serves other batch sizes and lengths (docs/design/sizes.md).

    size         numbers in a captured graph that depend on sizes, as text
    sources      the tensors that a trace is given, with symbols for their sizes
    lift         the graph of a trace, with text in the place of the nodes of sizes
    at           the graph at given sizes
    assumed      what a capture took for granted, and whether it holds for other values
    captures     the captures of a step, and why a call needs another one
    forms        a program for all sizes that are decided alike
    probe        other sizes that are decided alike
    alike        two values that differ in numbers alone, as one
"""
