"""A call of a compiled step that is made again: what the call before found out is used once more.

    given        whether the arguments are alike
    tensors      whether the tensors of the state are as they were
    attributes   tensors in attributes, which a step may set
    results      what the step returns, made of the program's outputs
    repeat       the whole call
"""
