"""Bad input: random and damaged bytes into every decoder, and senseless calls of the whole API.

Whatever comes is used, or refused with one of the errors that are documented for it. Nothing else:
no traceback of another kind, no value that the format does not allow, no wrong bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from tutti_core.trials.bad_calls import try_calls
from tutti_core.trials.decoders import Decoder, all_decoders
from tutti_core.trials.kit import quiet
from tutti_core.trials.mutation import mutate
from tutti_core.trials.tally import Tally

ROUNDS = 1200
"""Inputs of a cheap decoder in the fixed part; of a dear one as many fewer as it costs more."""


def run(
    directory: Path, *, seed: int, seconds: float, more: Sequence[Decoder] = (), calls: bool = True
) -> Tally:
    """Try bad input of every kind.

    Parameters
        seconds: 0: a fixed amount of work; else goes on with further seeds until they are over.
        more: decoders of packages that stand on this one.
        calls: whether senseless calls are made as well; they are the same for all seeds.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds
    directory.mkdir(parents=True, exist_ok=True)
    with quiet():
        decoders = (*all_decoders(directory), *more)
        if calls:
            try_calls(directory, tally)
        attack(decoders, tally, seed=seed, rounds=ROUNDS)
        while time.monotonic() < end_s and not tally.complaint_count:
            seed += 1
            attack(decoders, tally, seed=seed, rounds=ROUNDS // 10)
    return tally


def attack(decoders: Sequence[Decoder], tally: Tally, *, seed: int, rounds: int) -> None:
    """Give each decoder its samples, and `rounds` damaged inputs over its cost."""
    for decoder in decoders:
        rng = random.Random(f"{seed} {decoder.name}")
        for sample in decoder.samples:
            offer(decoder, sample, tally, f"seed {seed}, sample")
        for turn in range(max(rounds // decoder.cost, 1)):
            source = rng.choice(decoder.samples)
            data = mutate(source, decoder.samples, rng, decoder.text)
            offer(decoder, data, tally, f"seed {seed}, round {turn}")


def offer(decoder: Decoder, data: bytes, tally: Tally, what: str) -> None:
    """Give one input to one decoder and count it; a complaint says how to repeat it."""
    tally.bad_inputs[decoder.name] += 1
    error = decoder.refusal(data)
    if error is not None:
        shown = data if len(data) <= 200 else data[:200] + b"..."
        tally.complain(f"{decoder.name}, {what}: {type(error).__name__}: {error}: {shown!r}")


def replay(decoders: Sequence[Decoder], corpus: Path, tally: Tally) -> None:
    """Give each decoder every input of its folder in `corpus`."""
    for decoder in decoders:
        for file in sorted((corpus / decoder.name).glob("*")):
            offer(decoder, file.read_bytes(), tally, file.name)
