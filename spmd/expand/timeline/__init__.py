"""When a rank does what: a program replayed over streams, without running it."""
