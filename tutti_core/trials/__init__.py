"""Trials: attempts to break a store, each returning a count of what was tried and what broke.

The tests run them small, `make soak` long, and `tutti bench safety` counts them. Each module is one
kind of attack; `tally.py` is what they count in.
"""

from tutti_core.trials.tally import Tally

__all__ = ["Tally"]
