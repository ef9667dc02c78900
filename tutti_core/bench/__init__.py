"""Benchmarks behind `tutti bench`: transfers against peers, and the index by itself.

Each runs its contestants in interleaved rounds of one process, checks every byte it loads, deletes
what it wrote, and reports medians with their spread, the machine, and what the numbers rest on.
"""
