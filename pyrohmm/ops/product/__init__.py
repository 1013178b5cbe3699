"""Recursions of products of chains: messages have one axis for each chain."""
