"""Shows that the tests of the queue pair notice mistakes in it: each mutation must make them fail.

    python tests/native/mutations.py [NAME ...]     default: all; exit status 1: one survived

Every mutation is one edit of a header. The mutated test program is built plain, shaken (the
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
FLAGS = {
    "plain": ["-O1", "-g"],
    "shaken": ["-O1", "-g", "-DTUTTI_SHAKE"],
    "thread": ["-O1", "-g", "-DTUTTI_SHAKE", "-fsanitize=thread"],
}
BUILD_TIMEOUT_S = 300
RUN_TIMEOUT_S = 240


@dataclass(frozen=True)
class Mutation:
    """One mistake: in `file`, `old` becomes `new`; `build` notices it."""

    name: str
    file: str
    old: str
    new: str
    build: str


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
        "if (Shared(closed_).load_acquire() == kAbandoned) end_own(result, status::kDeviceGone);",
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
)


def build(source: Path, build_kind: str) -> Path:
    """Compile the test program of a tree."""
    program = source / f"nvme_test_{build_kind}"
    files = ["csrc/nvme/controller.cc", "csrc/nvme/soft_controller.cc", "tests/native/nvme_test.cc"]
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
            caught = not passes(build(tree, mutation.build))
        print(
            f"{'caught' if caught else 'SURVIVED':9} {mutation.name} ({mutation.build})", flush=True
        )
        if not caught:
            survived.append(mutation.name)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
