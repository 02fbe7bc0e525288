"""What readers get of a run: one offline page, one Markdown document, and the list of all runs."""
