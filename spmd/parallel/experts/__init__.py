"""Mixtures of experts whose experts are shared out over an axis (docs/design/experts.md)."""
