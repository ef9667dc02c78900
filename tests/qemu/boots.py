"""One boot of a guest in QEMU: what it is given, its time limit, and what is wrong with its end."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGES = ROOT / "build" / "qemu" / "packages"
"""Where QEMU, the guests' kernel and busybox are unpacked; `make clean` removes them."""
BUILD = ROOT / "build" / "qemu" / "cmake"
FETCH_LIMIT_S = 600
BOOT_LIMIT_S = 120
PASSED = 21 * 2 + 1  # exit status of QEMU where the guest's program ended with 0
MODULES = ("vfio", "vfio_iommu_type1", "vfio-pci")


class UnavailableError(Exception):
    """This machine cannot get what guests need."""


def prepare() -> Path:
    """Fetch the packages if they are not there, build the guest's program; returns the program."""
    fetched = subprocess.run(
        [str(HERE / "fetch.sh"), str(PACKAGES)],
        capture_output=True,
        text=True,
        timeout=FETCH_LIMIT_S,
        check=False,
    )
    if fetched.returncode == 77:
        raise UnavailableError(fetched.stderr.strip())
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    options = ["-DTUTTI_PYTHON=OFF", "-DTUTTI_QEMU_TESTS=ON"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "-j2", "--target", "guest_nvme"],
    ):
        built = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
    return BUILD / "tests" / "qemu" / "guest_nvme"


# ---- the guest's file system ----
def modules() -> dict[str, bytes]:
    """vfio-pci and what it needs, and the order in which they are loaded."""
    files = {path.stem: path for path in (PACKAGES / "kernel").rglob("*.ko")}
    order: list[str] = []

    def add(name: str) -> None:
        name = name if name in files else name.replace("_", "-")
        if name in order or name not in files:
            return  # built in
        needs = re.search(rb"depends=([^\0]*)\0", files[name].read_bytes())
        for other in needs[1].decode().split(",") if needs else ():
            add(other)
        order.append(name)

    for name in MODULES:
        add(name)
    found = {f"modules/{name}.ko": files[name].read_bytes() for name in order}
    return {**found, "modules/order": "".join(f"{name}.ko\n" for name in order).encode()}


def archive(files: Mapping[str, bytes]) -> bytes:
    """Files and their folders as a cpio archive, which the kernel unpacks; all may be executed."""
    made: list[bytes] = []

    def add(name: str, mode: int, data: bytes) -> None:
        size, named = len(data), name.encode() + b"\0"
        fields = (len(made) + 1, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(named), 0)
        head = b"070701" + b"".join(b"%08x" % value for value in fields) + named
        made.append(head + bytes(-len(head) % 4) + data + bytes(-size % 4))

    folders = {str(folder) for name in files for folder in Path(name).parents} - {"."}
    for folder in sorted(folders):
        add(folder, 0o040755, b"")
    for name, data in files.items():
        add(name, 0o100755, data)
    add("TRAILER!!!", 0, b"")
    return b"".join(made)


def base_files(program: Path) -> dict[str, bytes]:
    """What every guest has."""
    return {
        "init": (HERE / "init.sh").read_bytes(),
        "busybox": (PACKAGES / "busybox").read_bytes(),
        "guest_nvme": program.read_bytes(),
        **modules(),
    }


# ---- a boot ----
@dataclass(frozen=True)
class Boot:
    """What a guest is given."""

    suite: str
    devices: Sequence[str]  # arguments of QEMU
    bind: str  # PCI functions for vfio-pci, with commas; "none": sysfs
    iommu: bool = True
    words: str = ""  # more of the kernel's command line
    limit_s: float = BOOT_LIMIT_S
    memory: str = "512M"


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    status: int | None  # None: the time limit struck
    results: str  # of the guest's programs
    console: str  # of the kernel, with the beginning and end of each test
    errors: str = ""  # of QEMU

    @property
    def passed(self) -> list[str]:
        return re.findall(r"^RESULT (\S+) ok\b", self.results, re.MULTILINE)

    @property
    def faults(self) -> Counter[str]:
        """Lines in which the IOMMU refused an access, by the test that ran; "" outside of any."""
        found: Counter[str] = Counter()
        test = ""
        for line in self.console.splitlines():
            if begun := re.search(r"tutti: begin (\S+)", line):
                test = begun[1]
            elif "tutti: end " in line:
                test = ""
            elif "DMAR" in line and "fault" in line:
                found[test] += 1
        return found


def run(boot: Boot, files: Mapping[str, bytes], folder: Path) -> Outcome:
    """Boot a guest once; never takes longer than its limit."""
    kernel = next((PACKAGES / "kernel" / "boot").glob("vmlinuz-*"))
    (folder / "initramfs").write_bytes(archive(files))
    root = PACKAGES / "root"
    library = root / "usr/lib/x86_64-linux-gnu"
    iommu = ["-device", "intel-iommu,caching-mode=on"] if boot.iommu else []
    arguments = (
        "console=ttyS0 loglevel=4 panic=-1 intel_iommu=on mitigations=off tsc=reliable "
        f"no_timer_check random.trust_cpu=on tutti.suite={boot.suite} tutti.bind={boot.bind} "
        f"{boot.words}"
    )
    data = (root / "usr/share/qemu", root / "usr/share/seabios", root / "usr/lib/ipxe/qemu")
    command = [
        str(root / "usr/bin/qemu-system-x86_64"),
        *(word for path in data for word in ("-L", str(path))),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
        *("-m", boot.memory, "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"),
        *("-serial", f"file:{folder / 'console'}", "-serial", f"file:{folder / 'results'}"),
        *iommu,
        *boot.devices,
        *("-kernel", str(kernel), "-initrd", str(folder / "initramfs"), "-append", arguments),
    ]
    libraries = f"{library}:{root / 'lib/x86_64-linux-gnu'}"
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    environment["QEMU_MODULE_DIR"] = str(library / "qemu")
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=boot.limit_s,
            check=False,
        )
        status, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired:  # QEMU was killed
        status, errors = None, ""
    told = [
        (folder / name).read_text(errors="replace") if (folder / name).exists() else ""
        for name in ("results", "console")
    ]
    return Outcome(status, told[0], told[1], errors)


def problems(outcome: Outcome, tests: Sequence[str], faulty: Sequence[str] = ()) -> list[str]:
    """What is wrong with an outcome; nothing, if it is as it has to be.

    Parameters
        tests: the tests that have to have passed, in order, and no others.
        faulty: those of them that have to make the IOMMU refuse something. No other may.
    """
    found = []
    if outcome.status is None:
        found.append("the time limit struck")
    elif outcome.status != PASSED:
        found.append(f"QEMU ended with {outcome.status}: {outcome.errors.strip()}")
    if outcome.passed != list(tests):
        found.append(f"passed {outcome.passed}, to be passed {list(tests)}")
    found += [
        f"{count} IOMMU faults in {test or 'no test'!r}"
        for test, count in outcome.faults.items()
        if test not in faulty
    ]
    found += [f"no IOMMU fault in {test!r}" for test in faulty if not outcome.faults[test]]
    if found:
        found.append("console: " + outcome.console[-2000:])
    return found


@dataclass
class Disks:
    """Raw images and the arguments that make NVMe drives of them."""

    folder: Path
    arguments: list[str] = field(default_factory=list)

    def image(self, name: str, size_bytes: int) -> Path:
        path = self.folder / f"{name}.img"
        with path.open("wb") as file:
            file.truncate(size_bytes)
        return path

    def add(
        self, path: Path, serial: str, *, slot: str, more: str = "", bus: str = "pcie.0"
    ) -> None:
        name = serial.lower().replace("-", "")
        self.arguments += [
            *("-drive", f"file={path},if=none,id={name},format=raw,cache=unsafe"),
            *("-device", f"nvme,serial={serial},drive={name},bus={bus},addr={slot}{more}"),
        ]
