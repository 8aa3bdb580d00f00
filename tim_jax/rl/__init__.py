"""Sampling and learning: the loops and gradients around the one forward."""
