"""Tutti's NVMe driver and rings against QEMU's controllers, and the disks compared from outside."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from boots import Boot, Disks, Outcome, problems, run
from patterns import Plan, differing_blocks, expected_image, make_plan, pattern, text_of

MIB = 1 << 20
FIRST_BYTES = 64 * MIB
OTHER_BYTES = 16 * MIB
BASICS = (
    *("identify", "blocking", "queue_shadow", "queue_plain"),
    *("ring_sgl", "ring_prp", "ring_no_shadow", "resets"),
)
SHAPES = (*("logical_block_size=4096,physical_block_size=4096", "logical_block_size=512", "ms=8"),)
FAULTS = (
    *("bad_blocks", "deep_queue", "many_pairs", "shapes", "held_elsewhere"),
    *("stray_address", "hung_command", "removed"),
)


def plans_of(places: dict[str, tuple[int, int, int, int, int]], name: str) -> dict[str, Plan]:
    """Plans by test: first and end in MiB, count, lengths in bytes. Seeded by TUTTI_TEST_SEED."""
    rng = random.Random(os.environ.get("TUTTI_TEST_SEED", name))
    return {
        test: make_plan(rng, first * MIB, end * MIB, count, (low, high))
        for test, (first, end, count, low, high) in places.items()
    }


def basics() -> dict[str, Plan]:
    places = {
        "blocking": (1, 3, 12, 512, 40_960),
        "queue_shadow": (4, 8, 60, 512, 65_536),
        "queue_plain": (8, 12, 60, 512, 65_536),
        "ring_sgl": (12, 28, 24, 512, MIB),
        "ring_prp": (28, 44, 24, 512, MIB),
        "ring_no_shadow": (44, 54, 20, 512, MIB // 2),
        "resets": (54, 58, 50, 4096, 32_768),
    }
    return plans_of(places, "basics")


def guest_files(files: dict[str, bytes], plans: dict[str, Plan]) -> dict[str, bytes]:
    return {**files, **{f"plan/{name}": text_of(plan) for name, plan in plans.items()}}


def first_drive(disks: Disks) -> Path:
    image = disks.image("first", FIRST_BYTES)
    disks.add(image, "TUTTI-FIRST", slot="4.0")
    return image


def test_through_vfio(files: dict[str, bytes], disks: Disks, tmp_path: Path) -> None:
    plans = basics()
    chained = plans_of({"chained": (0, 16, 4, 2 * MIB, 3 * MIB)}, "chained")
    first, other = first_drive(disks), disks.image("other", OTHER_BYTES)
    disks.add(other, "TUTTI-OTHER", slot="5.0", more=",mdts=0")
    boot = Boot("vfio", disks.arguments, "0000:00:04.0,0000:00:05.0")
    outcome = run(boot, guest_files(files, {**plans, **chained}), tmp_path)
    assert problems(outcome, [*BASICS, "chained"]) == []
    expected = expected_image(FIRST_BYTES, list(plans.values()))
    assert differing_blocks(first, expected) == []
    assert differing_blocks(other, expected_image(OTHER_BYTES, list(chained.values()))) == []
    with first.open("r+b") as file:  # one bit, in a gap or in a stretch
        file.seek(30 * MIB + 17)
        byte = file.read(1)[0]
        file.seek(30 * MIB + 17)
        file.write(bytes([byte ^ 1]))
    assert differing_blocks(first, expected) == [30 * MIB]


def test_through_sysfs(files: dict[str, bytes], disks: Disks, tmp_path: Path) -> None:
    plans = basics()
    first = first_drive(disks)
    boot = Boot("sysfs", disks.arguments, "none", iommu=False)
    outcome = run(boot, guest_files(files, plans), tmp_path)
    assert problems(outcome, BASICS) == []
    assert differing_blocks(first, expected_image(FIRST_BYTES, list(plans.values()))) == []


def test_trouble(files: dict[str, bytes], disks: Disks, tmp_path: Path) -> None:
    slow_plans = plans_of({"after_hang": (1, 2, 3, 4096, 4096)}, "slow")
    other_plans = plans_of({"many_pairs": (0, 8, 192, 4096, 32_768)}, "other")
    rng = random.Random(os.environ.get("TUTTI_TEST_SEED", "shapes"))
    shape_plans = {
        "blocks_4096": make_plan(rng, 0, 8 * MIB, 16, (4096, MIB // 2), 4096),
        "blocks_512": make_plan(rng, 0, 8 * MIB, 16, (512, MIB // 2)),
    }
    removable_plans = plans_of({"removed": (0, 4, 4, 512, 65_536)}, "removable")
    first, other = disks.image("first", FIRST_BYTES), disks.image("other", OTHER_BYTES)
    bad_blocks = (
        f"driver=blkdebug,node-name=first,image.driver=file,image.filename={first}"
        ",inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.errno=5"
        ",inject-error.0.sector=8192"
        ",inject-error.1.event=none,inject-error.1.iotype=write,inject-error.1.errno=5"
        ",inject-error.1.sector=16384"
    )
    disks.arguments += ["-blockdev", bad_blocks]
    disks.arguments += ["-device", "nvme,serial=TUTTI-FIRST,drive=first,addr=4.0"]
    disks.add(other, "TUTTI-OTHER", slot="5.0")
    shapes = [disks.image(name, 8 * MIB) for name in ("blocks_4096", "blocks_512", "metadata")]
    disks.arguments += ["-device", "nvme,id=shapes,serial=TUTTI-SHAPES,addr=6.0"]
    for at, options in enumerate(SHAPES):
        name = f"shape{at}"
        disks.arguments += [
            *("-drive", f"file={shapes[at]},if=none,id={name},format=raw,cache=unsafe"),
            *("-device", f"nvme-ns,drive={name},bus=shapes,nsid={at + 1},{options}"),
        ]
    disks.add(disks.image("elsewhere", MIB), "TUTTI-ELSEWHERE", slot="7.0")
    disks.arguments += ["-device", "pcie-root-port,id=rp1,slot=1,addr=8.0"]
    removable = disks.image("removable", 4 * MIB)
    disks.add(removable, "TUTTI-REMOVABLE", slot="0.0", bus="rp1")
    slow = disks.image("slow", 2 * MIB)
    disks.arguments += [
        *("-object", "throttle-group,id=group,x-bps-total=100000"),
        *("-blockdev", f"driver=file,filename={slow},node-name=slow_file"),
        *("-blockdev", "driver=throttle,file=slow_file,throttle-group=group,node-name=slow"),
        *("-device", "nvme,serial=TUTTI-SLOW,drive=slow,addr=9.0"),
    ]
    bind = ",".join(f"0000:00:0{slot}.0" for slot in (4, 5, 6, 9)) + ",0000:01:00.0"
    boot = Boot("faults", disks.arguments, bind)
    every = {**slow_plans, **other_plans, **shape_plans, **removable_plans}
    outcome = run(boot, guest_files(files, every), tmp_path)
    assert problems(outcome, FAULTS, faulty=["stray_address"]) == []
    # What was provoked there would be a failure anywhere else.
    (stray, *_) = problems(outcome, FAULTS)
    assert "IOMMU faults in 'stray_address'" in stray
    for image, size, written in (
        (other, OTHER_BYTES, list(other_plans.values())),
        (shapes[0], 8 * MIB, [shape_plans["blocks_4096"]]),
        (shapes[1], 8 * MIB, [shape_plans["blocks_512"]]),
        (shapes[2], 8 * MIB, []),
        (removable, 4 * MIB, list(removable_plans.values())),
        (slow, 2 * MIB, list(slow_plans.values())),
    ):
        assert differing_blocks(image, expected_image(size, written)) == []


def test_a_write_that_is_not_made_is_noticed(
    files: dict[str, bytes], disks: Disks, tmp_path: Path
) -> None:
    plans = {"blocking": basics()["blocking"]}
    first = first_drive(disks)
    boot = Boot("skip", disks.arguments, "0000:00:04.0", words="tutti.skip")
    outcome = run(boot, guest_files(files, plans), tmp_path)
    assert problems(outcome, ["blocking"]) == []  # the guest says that all is well
    different = differing_blocks(first, expected_image(FIRST_BYTES, list(plans.values())))
    assert len(different) == sum(one.length_bytes for one in plans["blocking"]) // 512


def test_a_guest_that_dies_is_noticed(
    files: dict[str, bytes], disks: Disks, tmp_path: Path
) -> None:
    first_drive(disks)
    outcome = run(Boot("die", disks.arguments, "0000:00:04.0"), files, tmp_path)
    assert outcome.passed == ["identify"]
    assert problems(outcome, ["identify"])[0].startswith("QEMU ended with 45")


def test_a_guest_that_hangs_is_ended(files: dict[str, bytes], tmp_path: Path) -> None:
    outcome = run(Boot("hang", [], "none", iommu=False, limit_s=4), files, tmp_path)
    assert problems(outcome, [])[0] == "the time limit struck"


GOOD = Outcome(
    43,
    "RESULT one ok 0.1 s\r\nRESULT two ok 0.2 s\r\n",
    "tutti: begin one\ntutti: end one\ntutti: begin two\ntutti: end two\n",
)
FAULT = "DMAR: [DMA Read NO_PASID] Request device [00:04.0] fault addr 0xdead0000000\n"


def test_a_good_outcome_has_no_problems() -> None:
    assert problems(GOOD, ["one", "two"]) == []


@pytest.mark.parametrize(
    "bad",
    [
        Outcome(None, GOOD.results, GOOD.console),
        Outcome(0, GOOD.results, GOOD.console),
        Outcome(1, GOOD.results, GOOD.console),
        Outcome(45, GOOD.results, GOOD.console),
        Outcome(43, "RESULT one ok 0.1 s\n", GOOD.console),
        Outcome(43, GOOD.results + "RESULT three ok\n", GOOD.console),
        Outcome(43, GOOD.results.replace("one ok", "one failed"), GOOD.console),
        Outcome(43, GOOD.results, GOOD.console + FAULT),
        Outcome(43, GOOD.results, GOOD.console.replace("tutti: end one", FAULT)),
    ],
)
def test_a_bad_outcome_has_problems(bad: Outcome) -> None:
    assert problems(bad, ["one", "two"])


def test_an_expected_fault_has_to_be_there() -> None:
    assert problems(GOOD, ["one", "two"], faulty=["two"])
    told = Outcome(43, GOOD.results, GOOD.console.replace("tutti: end two", FAULT))
    assert problems(told, ["one", "two"], faulty=["two"]) == []


def test_patterns_of_both_languages_are_the_same() -> None:
    assert pattern(7, 16).hex() == "e27779bf026a15ed97463b8b6ca0d134"
