"""Plain single-device programs, as a user has them before using spmd."""
