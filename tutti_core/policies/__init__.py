"""Eviction policies: which pages of a prefix tree are worth keeping. Pure; compared by `replay`."""
