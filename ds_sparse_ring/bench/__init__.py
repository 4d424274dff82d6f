"""Benchmarks: patterns that anyone can make again, and the tables that docs/measurements.md quotes."""
