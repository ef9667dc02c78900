"""Coverage-guided fuzzing of one decoder, with atheris.

    python tests/fuzz/guided.py DECODER SECONDS SEED FOLDER

Starts from the decoder's samples and its corpus; what reaches new code is kept in FOLDER. An input
that breaks a rule is written there as crash-…, and the exit status is not 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tutti_core", "tutti_sglang"]):
    from options_decoder import OPTIONS

    from tutti_core.trials.decoders import all_decoders
    from tutti_core.trials.kit import quiet

CORPUS = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX = 16384
"""A superblock and a page in parts fit."""


def main(name: str, seconds: int, seed: int, folder: Path) -> None:
    seeds = folder / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    decoder = {each.name: each for each in (*all_decoders(folder), OPTIONS)}[name]
    for i, sample in enumerate(decoder.samples):
        (seeds / f"sample-{i}").write_bytes(sample)

    def one_input(data: bytes) -> None:
        error = decoder.refusal(data)
        if error is not None:
            raise error

    options = [f"-seed={seed}", f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}"]
    options += [
        "-timeout=20",
        f"-artifact_prefix={folder}/",
        "-verbosity=0",
        "-print_final_stats=1",
    ]
    kept = [str(seeds)] + [str(place) for place in [CORPUS / name] if place.is_dir()]
    atheris.Setup([sys.argv[0], *options, *kept], one_input)
    with quiet():
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
