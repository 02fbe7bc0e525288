"""Microbenchmarks: GEMMs and collectives at the model's sizes, run by the server's own interpreter."""
