"""Parameters, gradients and optimiser state sharded over data-parallel ranks, gathered a module at a time."""
