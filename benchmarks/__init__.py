"""Measurements: each command prints a table, and JSON as its last line."""
