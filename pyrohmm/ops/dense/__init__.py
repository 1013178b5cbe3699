"""Markov chains: see :mod:`pyrohmm.ops.recursions`."""
