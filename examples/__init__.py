"""Plain single-device programs: what a user has before they meet spmd."""
