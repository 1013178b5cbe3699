"""Chains whose messages have several axes: see :mod:`pyrohmm.ops.factorial`."""
