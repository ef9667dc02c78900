"""Random and damaged bytes into every decoder, senseless calls, and every input kept so far.

`make fuzz SECONDS=… SEED=…` runs the same for longer, and a coverage-guided fuzzer over the same
decoders. A failure says the decoder, the seed and the input; put the smallest such input, named
after what it found, into `corpus/<decoder>/`, and it is tried at every run from then on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from options_decoder import OPTIONS

from tutti_core import NamespaceStore, PrefixStore, StoreConfig
from tutti_core.format import SegmentEntry, Superblock
from tutti_core.tiers.parts import PartLayout
from tutti_core.trials import Tally, bad_input, decoders
from tutti_core.trials.bad_calls import try_calls
from tutti_core.trials.decoders import Decoder, all_decoders

SECONDS = float(os.environ.get("TUTTI_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("TUTTI_FUZZ_SEED", "0"))
CORPUS = Path(__file__).parent / "corpus"
NATIVE = [*(CORPUS / "native").iterdir()]


@pytest.fixture
def table(fast_path: Path) -> tuple[Decoder, ...]:
    return (*all_decoders(fast_path), OPTIONS)


def test_whatever_comes_is_used_or_refused(fast_path: Path) -> None:
    tally = bad_input.run(fast_path, seed=SEED, seconds=SECONDS, more=[OPTIONS])
    tally.check()
    calls = {name for name in tally.bad_inputs if name.startswith("call ")}
    assert len(calls) > 20 and all(tally.bad_inputs[name] for name in calls)
    names = {decoder.name for decoder in (*all_decoders(fast_path / "names"), OPTIONS)}
    assert names == tally.bad_inputs.keys() - calls
    assert all(tally.bad_inputs[name] >= 30 for name in names)


def test_the_corpus_is_tried_again(table: tuple[Decoder, ...]) -> None:
    tally = Tally()
    bad_input.replay(table, CORPUS, tally)
    tally.check()
    folders = {folder.name for folder in CORPUS.iterdir()} - {"native"}
    assert folders == set(tally.bad_inputs) == {decoder.name for decoder in table}
    assert sum(tally.bad_inputs.values()) + len(NATIVE) == sum(1 for _ in CORPUS.glob("*/*"))


def test_native_code_keeps_what_its_headers_promise() -> None:
    """The native corpus and some random inputs, under sanitizers; `native.sh` builds once."""
    command = ["sh", str(CORPUS.parent / "native.sh"), str(SEED), f"{SECONDS:.0f}", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 + SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing broken" in done.stdout or "Done" in done.stderr


# ---- negative controls: each breaks one rule, which the trial has to notice ----
def careless_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SegmentEntry,
        "decode",
        classmethod(lambda cls, data: cls(*np.frombuffer(data[:8].ljust(8, b"\1"), "<u4"))),
    )


def key_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreConfig, "parse", classmethod(lambda cls, settings: settings["path"]))


def unchecked_superblock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Superblock, "decode", classmethod(lambda cls, data, where: cls(data[:16], b"", 0, 1, 1, 1))
    )


def senseless_superblock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Superblock, "_is_possible", lambda self: True)


def trusting_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartLayout, "sound", lambda self, address, checksum: np.ones(1, dtype=np.bool_))


def unsealed_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoders, "record_is_sound", lambda raw: len(raw) == 96)


def wrapped_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoders, "token_array", lambda given: np.asarray(given).astype(np.uint32))


@pytest.mark.parametrize(
    ("breaking", "noticed"),
    [
        (careless_length, "segment"),
        (key_error, "settings"),
        (unchecked_superblock, "superblock"),
        (senseless_superblock, "sealed_superblock"),
        (trusting_parts, "page_in_parts"),
        (unsealed_record, "record"),
        (wrapped_tokens, "tokens"),
    ],
)
def test_a_broken_decoder_is_noticed(
    table: tuple[Decoder, ...],
    monkeypatch: pytest.MonkeyPatch,
    breaking: Callable[[pytest.MonkeyPatch], None],
    noticed: str,
) -> None:
    breaking(monkeypatch)
    tally = Tally()
    chosen = [decoder for decoder in table if decoder.name == noticed]
    with np.errstate(all="ignore"):
        bad_input.attack(chosen, tally, seed=SEED, rounds=bad_input.ROUNDS)
    assert any(text.startswith(noticed) for text in tally.complaints)


def attribute_error(patch: pytest.MonkeyPatch) -> None:
    match = NamespaceStore.match

    def careless(self: NamespaceStore, tokens: object, first: int = 0) -> object:
        tokens.__len__  # type: ignore[attr-defined]  # noqa: B018
        return match(self, tokens, first)

    patch.setattr(NamespaceStore, "match", careless)


def wrong_bytes(patch: pytest.MonkeyPatch) -> None:
    load = NamespaceStore.load

    def spoiling(
        self: NamespaceStore, tokens: object, memory: object, *rest: object, **more: object
    ):
        ticket = load(self, tokens, memory, *rest, **more)  # type: ignore[arg-type]
        ticket.wait(20)
        if isinstance(memory, bytearray) and memory:
            memory[0] ^= 1
        return ticket

    patch.setattr(NamespaceStore, "load", spoiling)


def open_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixStore, "_check_open", lambda self: None)


def twice_the_same_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(np, "unique", lambda values: values)


@pytest.mark.parametrize(
    ("breaking", "noticed"),
    [
        (attribute_error, "match"),
        (wrong_bytes, "wrong bytes"),
        (open_for_ever, "after close"),
        (twice_the_same_place, "twice into one place"),
    ],
)
def test_a_broken_call_is_noticed(
    fast_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    breaking: Callable[[pytest.MonkeyPatch], None],
    noticed: str,
) -> None:
    breaking(monkeypatch)
    tally = Tally()
    try:
        try_calls(fast_path, tally)
    except AssertionError as error:
        tally.complain(str(error))
    assert any(noticed in text for text in tally.complaints), tally.complaints
