"""Figures, the Markdown document and the one offline page."""
