"""Oracles that try everything: what exact solvers are held against."""
