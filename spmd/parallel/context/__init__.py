"""Long context: attention whose sequence is shared out over the ranks of an axis (docs/design/context-parallel.md)."""
