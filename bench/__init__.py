"""Benchmarks: commands that print what they measured, on what, and against whom."""
