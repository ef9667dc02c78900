"""Trace-driven evaluation: what policies and tiers would have hit on real requests.

Nothing here stores a byte. A trace (`trace`, read by `mooncake`, made up by `generate`) is replayed
through the index and policies that the store uses (`simulate`), compared with what no policy can
beat (`bounds`), and shown (`report`, `page`, `commands`).
"""
