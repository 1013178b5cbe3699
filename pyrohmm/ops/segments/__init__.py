"""Chains with durations: see :mod:`pyrohmm.ops.semi_markov`."""
