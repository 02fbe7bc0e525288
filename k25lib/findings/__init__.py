"""What the tables mean: do the parts close, how near is the bound, what would help, what changed."""
