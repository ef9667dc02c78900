"""The code that GPU threads run, compiled by g++, NVRTC and nvcc; and what is in it.

Nothing here runs on a GPU. What is read in the PTX: that every step of the queue touches shared
words in the order that its neighbours rely on, at system scope; that nothing in a lane's local
memory has an address; that the compilers agree on layouts. What this cannot show is listed in
docs/paths.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from mutations import MUTATIONS

from tutti_core._native import GioRing, NvmeController, SoftController
from tutti_core.gio.nvrtc import Nvrtc
from tutti_core.gio.sources import ENTRY, KERNEL, closure, find_cccl, package_folders

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "csrc" / "include"
PROBES = Path(__file__).with_name("order_probes.cu")
TIMEOUT_S = 300
REGISTERS_MAX = 128
"""Of a thread: 512 of them fit an SM then, four blocks as launched."""

ORDERED = re.compile(
    r"^\s*(?:@!?%p\d+ )?((?:(?:ld|st)\.(?:volatile|relaxed|acquire|release)|"
    r"(?:atom|red|membar|fence)(?=\.))"
    r"[.\w:]*)",
    re.MULTILINE,
)

# What each step of order_probes.cu does to shared words, in order, and why it has to.
LOAD, STORE, MARK = "ld.acquire.sys", "st.release.sys", "st.release.sys.b64"
CAS, SWAP, FENCE = "atom.cas.acq_rel.sys", "atom.exch.acq_rel.sys", "membar.sys"
ADD, WEAK_LOAD, WEAK_STORE = "atom.add.acq_rel.sys", "ld.relaxed.sys", "st.relaxed.sys"
TAKE_ID = [LOAD, WEAK_LOAD, CAS]
GIVE_ID = [LOAD, WEAK_STORE, CAS]
CLAIM = [LOAD, WEAK_LOAD, CAS]
STEPS = {
    "load_relaxed": [WEAK_LOAD],
    "load_acquire": [LOAD],
    "store_relaxed": [WEAK_STORE],
    "store_release": [STORE],
    "exchange": [SWAP],
    "add": [ADD],
    "swap_if": [CAS],
    "fence": [FENCE],
    # Value and status before the word that says they are there.
    "finish": [STORE],
    "done": [LOAD],
    # Closed?; an id; a slot, whose head is acquired: the controller has read what is overwritten.
    # Then the result and its owner, and the mark last: a doorbell may cover the entry from there.
    "submit": [LOAD, *TAKE_ID, *CLAIM, *GIVE_ID, WEAK_STORE, WEAK_STORE, MARK],
    "marked": [LOAD],
    # Entries that other threads wrote, before the doorbell.
    "doorbell": [FENCE, STORE],
    # The shadow's store before the event's load.
    "shadow": [FENCE, STORE, FENCE, LOAD, STORE],
    # The word with the phase first. Then what was rung, the owner, the head, the result, the id;
    # in between what is counted, which orders nothing.
    "completion": [
        LOAD, WEAK_LOAD, WEAK_LOAD, WEAK_LOAD, WEAK_STORE, LOAD, WEAK_STORE, SWAP, WEAK_STORE,
        WEAK_STORE, STORE, STORE, *GIVE_ID,
    ],
    "forget": [CAS, STORE],
    # Statuses; then the state; then the word that the CPU polls.
    "end_fragments": [ADD, STORE, STORE],
}  # fmt: skip


def steps_of(ptx: str) -> dict[str, list[str]]:
    """What each entry does to shared words."""
    entries = re.findall(r"\.entry (\w+)\((.*?)\n\}", ptx, re.DOTALL)
    return {name: ORDERED.findall(body) for name, body in entries}


def differing(ptx: str) -> list[str]:
    """Steps that do something else than they have to."""
    found = steps_of(ptx)
    assert found.keys() == STEPS.keys()
    return [
        name
        for name, wanted in STEPS.items()
        if len(found[name]) != len(wanted)
        or not all(one.startswith(want) for one, want in zip(found[name], wanted, strict=True))
    ]


def faults_of(ptx: str) -> list[str]:
    """What must not be in the kernel, and is; and what must be, and is not."""
    found = []
    for pattern, what in (
        (r"\.local\b|cvta\.local|__local_depot", "local memory"),
        (r"\.shared\b", "shared memory, of which the design has none"),
        (r"\bld(?:\.global)?\.nc\b", "a load that sees no stores of others"),
        (r"\bcall\b", "a call: something was not inlined, or is recursive"),
        (r"\.(?:gpu|cta|cluster)\b", "a scope that leaves out the CPU"),
    ):
        if re.search(pattern, ptx):
            found.append(what)
    unscoped = [
        one for one in ORDERED.findall(ptx) if ".sys" not in one or one.startswith("ld.volatile")
    ]
    found += [f"no system scope: {one}" for one in unscoped]
    present = set(ORDERED.findall(ptx))
    for wanted in (LOAD, STORE, MARK, CAS, SWAP, ADD, FENCE):
        if not any(one.startswith(wanted) for one in present):
            found.append(f"{wanted} is missing")
    return found


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def by_nvrtc(nvrtc: Nvrtc, file: Path, headers: Path = HEADERS) -> str:
    ptx = nvrtc.compile(file.read_text(), (headers, find_cccl()), "compute_90")
    return ptx.rstrip(b"\0").decode()


def nvcc() -> Path:
    """The compiler of NVIDIA's wheel. Its absence is a failure: requirements-dev.txt has it."""
    for folder in package_folders("nvidia"):
        for path in sorted(folder.glob("cu13/bin/nvcc")):
            return path
    pytest.fail("nvidia-cuda-nvcc is not installed; `make env` installs it")


def by_nvcc(target: Path, file: Path, *options: str) -> str:
    """Compile for Hopper; returns what was said."""
    command = [
        str(nvcc()), "-std=c++20", "-arch=sm_90", "-Werror", "all-warnings", f"-I{HEADERS}",
        *options, "-o", str(target), str(file),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# -- three compilers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(closure(KERNEL.read_text(), HEADERS)))
def test_every_header_of_the_kernel_stands_alone_with_each_compiler(
    name: str, nvrtc: Nvrtc, tmp_path: Path
) -> None:
    file = tmp_path / "alone.cu"
    file.write_text(f'#include "{name}"\n#include "{name}"\n__global__ void nothing() {{}}\n')
    by_nvrtc(nvrtc, file)
    by_nvcc(tmp_path / "alone.ptx", file, "-ptx")
    plain = tmp_path / "alone.cc"
    plain.write_text(f'#include "{name}"\n#include "{name}"\n')
    by_gcc(tmp_path / "alone.o", plain, "-c")


def by_gcc(target: Path, file: Path, *options: str) -> None:
    done = subprocess.run(
        ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion",
         "-Wsign-conversion", f"-I{HEADERS}", *options, "-o", str(target), str(file)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["nvrtc", "nvcc"])
def kernel_ptx(request: pytest.FixtureRequest, nvrtc: Nvrtc, tmp_path_factory: object) -> str:
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    if request.param == "nvrtc":
        return by_nvrtc(nvrtc, KERNEL)
    target = tmp_path_factory.mktemp("nvcc") / "kernel.ptx"
    by_nvcc(target, KERNEL, "-ptx")
    return target.read_text()


def test_the_kernel_is_what_it_has_to_be(kernel_ptx: str) -> None:
    assert kernel_ptx.count(f".visible .entry {ENTRY}(") == 1
    assert faults_of(kernel_ptx) == []


def test_the_kernel_and_the_ring_agree_on_a_launch(kernel_ptx: str) -> None:
    size = re.search(rf"\.param \.align 8 \.b8 {ENTRY}_param_1\[(\d+)\]", kernel_ptx)
    soft = SoftController(namespace_bytes=1 << 20)
    controller = NvmeController(soft, queue_pairs=2)
    ring = GioRing([(controller, 1)], depth=1, threads=0, timeout_s=1.0)
    assert size and int(size[1]) == len(ring.launch())
    ring.close()
    controller.close()


def test_registers_and_memory_of_the_kernel_are_sane(tmp_path: Path) -> None:
    said = by_nvcc(tmp_path / "kernel.cubin", KERNEL, "-cubin", "-Xptxas", "-v")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    registers = re.search(r"Used (\d+) registers", said)
    assert registers and int(registers[1]) <= REGISTERS_MAX
    assert "smem" not in said and "lmem" not in said


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_nvrtc_compiles_for_the_gpus_of_today(nvrtc: Nvrtc, capability: int) -> None:
    target = nvrtc.target_for(capability)
    assert target == f"sm_{capability}"
    cubin = nvrtc.compile(KERNEL.read_text(), (HEADERS, find_cccl()), target)
    assert cubin.startswith(b"\x7fELF") and ENTRY.encode() in cubin


LAYOUT = """
#include "tutti/gio.h"
using namespace tutti;
using namespace tutti::gio;
#define SIZE(type) SHOW(sizeof_##type, sizeof(type))
#define OFFSET(type, member) SHOW(type##_##member, offsetof(type, member))
#define SIZES \\
    SIZE(Fragment) SIZE(Work) SIZE(Iocb) SIZE(Device) SIZE(View) SIZE(Launch) \\
    SHOW(sizeof_Queue, sizeof(nvme::Queue)) SHOW(sizeof_Region, sizeof(nvme::Region)) \\
    SHOW(sizeof_Command, sizeof(nvme::Command)) SHOW(sizeof_Result, sizeof(nvme::Result))
#define OFFSETS \\
    OFFSET(Fragment, region) OFFSET(Work, status) OFFSET(Iocb, left) OFFSET(Iocb, fragments) \\
    OFFSET(Iocb, work) OFFSET(Device, regions) OFFSET(Device, sgl) OFFSET(View, words) \\
    OFFSET(View, devices) OFFSET(Launch, ids) OFFSET(Launch, first)
"""


def test_the_compilers_agree_on_layouts(nvrtc: Nvrtc, tmp_path: Path) -> None:
    shown = '#define SHOW(name, value) extern "C" __device__ const u32 show_##name = value;\n'
    file = tmp_path / "layout.cu"
    file.write_text(LAYOUT + shown + "SIZES OFFSETS\n")
    by_nvcc(tmp_path / "layout.ptx", file, "-ptx")
    on_gpu = _shown((tmp_path / "layout.ptx").read_text())
    file.write_text(LAYOUT + shown + "SIZES\n")  # offsets are no constants to NVRTC
    by_run_time = _shown(by_nvrtc(nvrtc, file))
    plain = tmp_path / "layout.cc"
    plain.write_text(
        "#include <cstdio>\n" + LAYOUT
        + '#define SHOW(name, value) std::printf("%s %zu\\n", #name, size_t(value));\n'
        "int main() { SIZES OFFSETS }\n"
    )  # fmt: skip
    by_gcc(tmp_path / "layout", plain)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True)
    on_cpu = {name: int(value) for name, value in map(str.split, said.stdout.splitlines())}
    assert len(on_cpu) == 21 and on_cpu == on_gpu
    assert by_run_time == {k: v for k, v in on_cpu.items() if k.startswith("sizeof_")}


def _shown(ptx: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\bshow_(\w+)(?: = (\d+))", ptx)}


# -- order -----------------------------------------------------------------------------------------


def test_each_step_touches_shared_words_in_its_order(nvrtc: Nvrtc, tmp_path: Path) -> None:
    assert differing(by_nvrtc(nvrtc, PROBES)) == []
    by_nvcc(tmp_path / "probes.ptx", PROBES, "-ptx")
    assert differing((tmp_path / "probes.ptx").read_text()) == []


RUN, GIO, PORTABLE, QUEUE = (
    f"csrc/include/tutti/{name}.h" for name in ("gio_run", "gio", "portable", "nvme_queue")
)
MINE = {
    "device_scope": (PORTABLE, "cuda::thread_scope_system", "cuda::thread_scope_device"),
    "release_of_nothing": (
        PORTABLE, "word.store(value, memory_order_release)",
        "word.store(value, memory_order_relaxed)",
    ),
    "exchange_relaxed": (
        PORTABLE, "word.exchange(value, memory_order_acq_rel)",
        "word.exchange(value, memory_order_relaxed)",
    ),
    "fence_of_the_block": (PORTABLE, "__threadfence_system();", "__threadfence();"),
    "fence_before_the_doorbell": (QUEUE, "full_fence();  // entries before the doorbell", "//"),
    "head_relaxed": (
        QUEUE, "const u64 fetched = Shared(fetched_).load_acquire();",
        "const u64 fetched = Shared(fetched_).load_relaxed();",
    ),
    "completion_word_relaxed": (
        GIO, "Shared(view.words[id]).store_release(generation);",
        "Shared(view.words[id]).store_relaxed(generation);",
    ),
    "result_in_local_memory": (
        RUN, "switch (queue.try_submit(command, work.result)) {",
        "nvme::Result mine{};\n        switch (queue.try_submit(command, mine)) {",
    ),
}  # fmt: skip
SHARED = {
    one.name: (one.file, one.old, one.new)
    for one in MUTATIONS
    if one.name.endswith("_relaxed") and one.file == QUEUE
}


MISTAKES = MINE | SHARED


@pytest.mark.parametrize(("name", "edit"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_in_a_header_is_noticed(
    name: str, edit: tuple[str, str, str], nvrtc: Nvrtc, tmp_path: Path
) -> None:
    shutil.copytree(HEADERS, tmp_path / "csrc" / "include")
    headers = tmp_path / "csrc" / "include"
    file = tmp_path / edit[0]
    text = file.read_text()
    assert text.count(edit[1]) == 1, f"{name}: its place has moved"
    file.write_text(text.replace(edit[1], edit[2]))
    wrong = differing(by_nvrtc(nvrtc, PROBES, headers))
    assert wrong or faults_of(by_nvrtc(nvrtc, KERNEL, headers))


def test_the_mutations_of_the_queue_are_among_them() -> None:
    assert {"doorbell_relaxed", "phase_relaxed", "mark_relaxed"} <= SHARED.keys()
