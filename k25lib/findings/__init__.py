"""What the tables say together: closure, what-if, comparison."""
