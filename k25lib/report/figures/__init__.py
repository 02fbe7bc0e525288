"""Figures: each function takes a table (DataFrame) and returns a plotly Figure; none measures or reads files."""
