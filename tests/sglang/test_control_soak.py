"""The parts of the soak that need no server: its faults are faults, its eyes can see."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_cpu.server import CachedTokens, Generation
from sglang_cpu.soak import Look, Report, differs, make_prompts

REFERENCE = Generation(8, (5, 6, 7), (-1.0, -2.0, -3.0), CachedTokens(), 0.0, 0.0)


@pytest.mark.parametrize(
    ("output", "logprobs", "wrong"),
    [
        ((5, 6, 7), (-1.0, -2.0, -3.0), False),
        ((5, 6, 7), (-1.0, -2.0, -3.0005), False),
        ((5, 6, 7), (-1.0, -2.1, -3.0), True),  # a wrong page
        ((5, 9, 4), (-1.0, -2.0001, -7.0), False),  # a tie, and what came of it
        ((5, 9, 4), (-1.0, -2.2, -7.0), True),
        ((8, 6, 7), (-1.5, -2.0, -3.0), True),
    ],
)
def test_differences_beyond_rounding_are_seen(
    output: tuple[int, ...], logprobs: tuple[float, ...], wrong: bool
) -> None:
    reply = dataclasses.replace(REFERENCE, output_ids=output, logprobs=logprobs)
    assert differs(reply, REFERENCE) is wrong


def test_growth_is_seen() -> None:
    def report(*looks: tuple[int, int, int]) -> Report:
        return Report("linker", 1.0, 0, looks=[Look(float(i), *x) for i, x in enumerate(looks)])

    steady = [(40, 70, 500_000)] * 8
    assert report(*steady).leaks() == []
    assert report(*steady, (43, 75, 600_000), (40, 70, 500_000)).leaks() == []  # for a moment
    for more, word in (
        ((41, 70, 500_000), "threads"),
        ((40, 71, 500_000), "descriptors"),
        ((40, 70, 600_000), "anonymous_kib"),
    ):
        (said,) = report(*steady, *[more] * 4).leaks()
        assert said.startswith(word)


def test_prompts_are_reproducible_and_share_beginnings() -> None:
    import random

    prompts = make_prompts(random.Random("a"))
    assert prompts == make_prompts(random.Random("a"))
    assert prompts != make_prompts(random.Random("b"))
    starts = [tuple(prompt[:16]) for prompt in prompts]
    assert len(set(starts)) < len(starts) / 5


@pytest.fixture
def server_args(model: Path, backend_name: str) -> Iterator[Any]:
    if backend_name != "tutti":
        pytest.skip("tutti's own linker")
    from linker_kit import published

    with published(model) as args:
        yield args


@pytest.mark.parametrize("fault", ["failed", "flipped"])
def test_the_faulty_linker_is_faulty_and_recovers(
    fault: str, server_args: Any, store_folder: Path
) -> None:
    """A load that the device spoils fails, and what was damaged is not offered again."""
    from linker_kit import Rig, keys_of, make_pools
    from sglang_cpu.faulty_linker import Faults, FaultyLinker

    pools = make_pools("mha")
    pools.fill()
    source, target = [3, 4, 5, 9], [21, 22, 25, 26]
    before = [pools.read("kv", page) for page in source]
    with Rig(server_args, pools, store_folder) as rig:
        for i in range(12):
            assert rig.offload(keys_of(f"chain {i}", 4), source)

    outcomes = []
    faults = Faults(delay_s=0.005, seed=1, **{fault: 0.5})
    rig = Rig.__new__(Rig)
    rig.pools = pools
    rig.linker = FaultyLinker(
        server_args,
        pools.params,
        components=pools.components,
        extra_config={
            "path": str(store_folder),
            "capacity": "64MiB",
            "segment": "1MiB",
            "faults": dataclasses.asdict(faults),
        },
    )
    rig.layer_count = rig.linker.layer_done_counter.num_layers
    with rig:
        for i in range(12):
            keys = keys_of(f"chain {i}", 4)
            assert rig.lookup(keys)[-1] == 4
            pools.wipe("kv", target)
            landed = rig.load(keys, target)
            outcomes.append(landed)
            if landed:
                assert [pools.read("kv", page) for page in target] == before
            else:
                assert 4 not in rig.lookup(keys), "a page that cannot be read is still offered"
    assert set(outcomes) == {True, False}, outcomes
