"""Shows that the tests of queue pairs and rings notice mistakes in them: each mutation fails them.

    python tests/native/mutations.py [NAME ...]     default: all; exit status 1: one survived

Every mutation is one edit of a source. The mutated test program is built plain, shaken (the
processor given away at random before shared accesses) or with ThreadSanitizer, whichever is known
to notice; a crash, a failed check, a report and a hang all count. Takes some minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "csrc/include/tutti/nvme_queue.h"
MEMORY = "csrc/include/tutti/nvme_memory.h"
GIO = "csrc/include/tutti/gio.h"
RUN = "csrc/include/tutti/gio_run.h"
RING = "csrc/gio/ring.cc"
TABLE = "csrc/nvme/table.cc"
FINDER = "csrc/include/tutti/nvme_table.h"
CONTROLLER = "csrc/nvme/controller.cc"
FLAGS = {
    "plain": ["-O1", "-g"],
    "shaken": ["-O1", "-g", "-DTUTTI_SHAKE"],
    "thread": ["-O1", "-g", "-DTUTTI_SHAKE", "-fsanitize=thread"],
}
BUILD_TIMEOUT_S = 300
RUN_TIMEOUT_S = 240


@dataclass(frozen=True)
class Mutation:
    """One mistake: in `file`, `old` becomes `new`; `build` of `program` notices it."""

    name: str
    file: str
    old: str
    new: str
    build: str
    program: str = "nvme_test"


MUTATIONS = (
    Mutation(
        "doorbell_relaxed",
        QUEUE,
        "Shared(*doorbell).store_release(next);",
        "Shared(*doorbell).store_relaxed(next);",
        "thread",
    ),
    Mutation(
        "phase_relaxed",
        QUEUE,
        "Shared(entry.id_and_status).load_acquire()",
        "Shared(entry.id_and_status).load_relaxed()",
        "thread",
    ),
    Mutation(
        "result_state_relaxed",
        QUEUE,
        "result.status = status;\n        Shared(result.state).store_release(kDone);",
        "result.status = status;\n        Shared(result.state).store_relaxed(kDone);",
        "thread",
    ),
    Mutation(
        "mark_relaxed",
        QUEUE,
        "Shared(m_.marks[slot]).store_release(ticket + 1);",
        "Shared(m_.marks[slot]).store_relaxed(ticket + 1);",
        "thread",
    ),
    Mutation(
        "cq_doorbell_missing",
        QUEUE,
        "ring_cq(u32(first % cq_entries_), u32(at % cq_entries_));",
        "",
        "plain",
    ),
    Mutation(
        "phase_not_flipped",
        QUEUE,
        "const u32 phase = (at / cq_entries_ & 1) == 0 ? 1 : 0;",
        "const u32 phase = 1;",
        "plain",
    ),
    Mutation(
        "lost_wake_up",
        QUEUE,
        "if (!marked(last)) return;",
        "return;",
        "shaken",
    ),
    Mutation(
        "ring_never_combines",
        QUEUE,
        "while (last - first < sq_entries_ && marked(last)) ++last;",
        "if (marked(last)) ++last;",
        "plain",
    ),
    Mutation(
        "slots_freed_by_completions",
        QUEUE,
        "Shared(fetched_).store_release(fetched + step);",
        "Shared(fetched_).store_release(fetched + 1);",
        "plain",
    ),
    Mutation(
        "bad_head_believed",
        QUEUE,
        "if (head >= sq_entries_ || fetched + step > Shared(rung_).load_acquire()) {",
        "if (head >= sq_entries_) {",
        "plain",
    ),
    Mutation(
        "ring_takes_one_too_many",
        QUEUE,
        "if (next - fetched >= sq_entries_ - 1) return false;",
        "if (next - fetched >= sq_entries_) return false;",
        "plain",
    ),
    Mutation(
        "id_not_returned",
        QUEUE,
        "        give_id(id);\n        return true;",
        "        return true;",
        "plain",
    ),
    Mutation(
        "second_completion_believed",
        QUEUE,
        "if (owner == kNoOwner) return false;",
        "if (owner == kNoOwner) return give_id(id), true;",
        "plain",
    ),
    Mutation(
        "other_queue_believed",
        QUEUE,
        "if (head >> 16 == id_) {",
        "if (true) {",
        "plain",
    ),
    Mutation(
        "forgotten_id_reused",
        QUEUE,
        "        finish(result, status::kTimeout, 0);\n        return true;",
        "        finish(result, status::kTimeout, 0);\n        give_id(result.command_id);\n"
        "        return true;",
        "plain",
    ),
    Mutation(
        "stale_phase_not_cleared",
        QUEUE,
        "m_.cq[slot] = Completion{};",
        "(void)slot;",
        "plain",
    ),
    Mutation(
        "event_rule_off_by_one",
        QUEUE,
        "return u16(next - event - 1) < u16(next - old);",
        "return u16(next - event) < u16(next - old);",
        "plain",
    ),
    Mutation(
        "abandon_forgets_the_late",
        QUEUE,
        "if (abandoned()) withdraw(result);",
        "",
        "shaken",
    ),
    Mutation(
        "prp_link_missing",
        MEMORY,
        "list[at * kListEntries + kListAddresses] = region.list_dma + (at + 1) * kPageBytes;",
        "(void)at;",
        "plain",
    ),
    Mutation(
        "prp_ends_on_link",
        MEMORY,
        "const bool ends_on_link = last % kListAddresses == 0;",
        "const bool ends_on_link = false;",
        "plain",
    ),
    Mutation(
        "prp_list_page_full",
        MEMORY,
        "inline constexpr u32 kListAddresses = kListEntries - 1;",
        "inline constexpr u32 kListAddresses = kListEntries;",
        "plain",
    ),
    Mutation(
        "sgl_of_a_scattered_region",
        MEMORY,
        "if (dma != region.dma + page * kPageBytes) region.contiguous = 0;",
        "",
        "plain",
    ),
    Mutation(
        "iocb_ends_relaxed",
        GIO,
        "Shared(iocb.state).store_release(u32(State::kDone));\n"
        "    // Release, and the last access: statuses and state before the word that the CPU "
        "polls.\n"
        "    Shared(view.words[id]).store_release(generation);",
        "Shared(iocb.state).store_relaxed(u32(State::kDone));\n"
        "    Shared(view.words[id]).store_relaxed(generation);",
        "thread",
        "gio_test",
    ),
    Mutation(
        "done_before_the_last",
        GIO,
        "if (Shared(iocb.left).add(u32(0) - count) != count) return;",
        "if (Shared(iocb.left).add(u32(0) - count) < 1) return;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "issued_twice",
        GIO,
        "{kNever, kNever, kNever, kRunning, kNever, kDone, kNever},    // ISSUED",
        "{kNever, kNever, kIssued, kRunning, kNever, kDone, kNever},    // ISSUED",
        "plain",
        "gio_test",
    ),
    Mutation(
        "full_queue_stops_all",
        RUN,
        "if (full_devices_ == launch_.devices || waiting_ == kAsideMax) return;",
        "return;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "passed_over_for_good",
        RUN,
        "if (work.phase == Phase::kWaiting && !advance(iocb, index)) ++waiting_;",
        "(void)0;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "mdts_ignored",
        RUN,
        "const u32 length = left < device.transfer_bytes_max ? left : device.transfer_bytes_max;",
        "const u32 length = left;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "parts_of_blocks",
        RUN,
        "length_bytes = pointer.length_bytes >> device.block_shift << device.block_shift;",
        "length_bytes = pointer.length_bytes;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "rest_at_the_wrong_place",
        RUN,
        "(fragment.offset_bytes + work.moved_bytes) >> device.block_shift;",
        "fragment.offset_bytes >> device.block_shift;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "goes_on_after_an_error",
        RUN,
        "if (work.result.status != nvme::status::kSuccess) return end(work, work.result.status);",
        "",
        "plain",
        "gio_test",
    ),
    Mutation(
        "rings_for_each",
        RUN,
        "if (unrung != 0 && (enough || last",
        "if (unrung != 0 && (true || enough || last",
        "plain",
        "gio_test",
    ),
    Mutation(
        "rings_for_each_rest",
        RUN,
        "return next_.at >= total_ && waiting_ == 0 && unfinished_ == 0;",
        "return next_.at >= total_ && waiting_ == 0;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "waits_for_enough",
        RUN,
        "|| idle >= kIdleTurns)) {",
        ")) {",
        "plain",
        "gio_test",
    ),
    Mutation(
        "memory_given_back_too_soon",
        RING,
        "memory.lose(region);",
        "memory.drop(region);",
        "plain",
        "gio_test",
    ),
    Mutation(
        "region_not_in_use",
        RING,
        "if ((word & bit) == 0) finder.use(u32(region));",
        "if ((word & bit) == 0) word |= 0;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "alignment_not_checked",
        RING,
        "if (fragments.address[index] % 4 != 0) return nvme::status::kBadMemory;",
        "",
        "plain",
        "gio_test",
    ),
    Mutation(
        "end_of_the_device_not_checked",
        RING,
        "if (length > capacities_[device] || offset > capacities_[device] - length)",
        "if (length > capacities_[device])",
        "plain",
        "gio_test",
    ),
    Mutation(
        "reset_amid_launches",
        RING,
        "if ((devices & resetting_) != 0) return -EBUSY;",
        "",
        "plain",
        "gio_test",
    ),
    Mutation(
        "reset_waits_for_all",
        RING,
        "return (touched_[id] & devices) != 0;",
        "return true;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "reset_amid_a_launch",
        RING,
        "touched_[id] = devices;",
        "touched_[id] = devices_[id];",
        "plain",
        "gio_test",
    ),
    Mutation(
        "death_not_noticed",
        RING,
        "if (target.controller->close_if_dead()) target.memory->reclaim();",
        "",
        "plain",
        "gio_test",
    ),
    Mutation(
        "unregisters_what_is_used",
        TABLE,
        "if (uses_[index] != 0 || lost_[index]) return -EBUSY;",
        "if (lost_[index]) return -EBUSY;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "unregisters_what_is_lost",
        TABLE,
        "if (uses_[index] != 0 || lost_[index]) return -EBUSY;",
        "if (uses_[index] != 0) return -EBUSY;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "overlap_with_the_one_before",
        TABLE,
        "if (before.address + before.length_bytes > address) return -EEXIST;",
        "(void)before;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "found_beyond_the_end",
        FINDER,
        "address - region.address <= region.length_bytes - length_bytes;",
        "address - region.address < region.length_bytes;",
        "plain",
        "gio_test",
    ),
    Mutation(
        "flush_amid_a_reset",
        CONTROLLER,
        "    std::shared_lock running(running_);\n",
        "",
        "thread",
        "gio_test",
    ),
    Mutation(
        "abandoned_is_closed",
        QUEUE,
        "Shared(closed_).swap_if(open, kClosed);",
        "(void)open, Shared(closed_).store_release(kClosed);",
        "plain",
        "gio_test",
    ),
    Mutation(
        "closes_what_lives",
        CONTROLLER,
        "if (!control.owns_lock() || !open_ || (!dead() && ready())) return false;",
        "if (!control.owns_lock() || !open_) return false;",
        "plain",
        "gio_test",
    ),
)


def build(source: Path, name: str, build_kind: str) -> Path:
    """Compile a test program of a tree."""
    program = source / f"{name}_{build_kind}"
    parts = [*source.glob("csrc/nvme/*.cc"), *source.glob("csrc/gio/*.cc")]
    files = [*sorted(str(part.relative_to(source)) for part in parts), f"tests/native/{name}.cc"]
    command = ["g++", "-std=c++20", "-w", *FLAGS[build_kind], "-Icsrc/include", *files]
    subprocess.run(
        [*command, "-pthread", "-o", str(program)], cwd=source, check=True, timeout=BUILD_TIMEOUT_S
    )
    return program


def passes(program: Path) -> bool:
    """Whether the tests pass."""
    try:
        done = subprocess.run(
            [str(program)],
            capture_output=True,
            timeout=RUN_TIMEOUT_S,
            env={"TSAN_OPTIONS": "halt_on_error=1"},
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(names: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not names or m.name in names]
    survived = []
    for mutation in chosen:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            for part in ("csrc", "tests/native"):
                shutil.copytree(ROOT / part, tree / part)
            file = tree / mutation.file
            text = file.read_text()
            assert text.count(mutation.old) == 1, f"{mutation.name}: its place has moved"
            file.write_text(text.replace(mutation.old, mutation.new))
            caught = not passes(build(tree, mutation.program, mutation.build))
        print(
            f"{'caught' if caught else 'SURVIVED':9} {mutation.name} ({mutation.build})", flush=True
        )
        if not caught:
            survived.append(mutation.name)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
