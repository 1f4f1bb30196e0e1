"""Measuring: timing, rooflines, sweeps, and reports made of them. Nothing in the library imports this."""
