"""Passes over programs and bound graphs: each keeps the numbers and says what it did."""
