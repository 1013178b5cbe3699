"""Recursions of Markov chains with a dense transition matrix."""
