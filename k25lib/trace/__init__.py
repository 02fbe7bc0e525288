"""The trace engine: profiler files -> one kernel table -> time per decode step."""
