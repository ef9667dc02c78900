"""Raw block devices as pools, on loop devices: guarded against every sign of use, then usable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutti_core import ConfigError, PrefixStore, StoreConfig
from tutti_core.cli import main
from tutti_core.tiers import block_device
from tutti_core.tiers.pools import discard_store, open_layout
from tutti_core.verify import verify_store

SIZE = 32 << 20
PAGE_BYTES = 65536


def _loop_device(image: Path) -> str:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    image.touch()
    os.truncate(image, SIZE)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this machine has no loop devices: {made.stderr.strip()}")
    return made.stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    name = _loop_device(tmp_path / "disk.img")
    yield Path(name)
    subprocess.run(["losetup", "--detach", name], check=True)


def config_for(tmp_path: Path, *pools: Path) -> StoreConfig:
    """Each device named with what tells it from others: a loop device's is the file behind it."""
    image = str(tmp_path / "disk.img")
    settings: dict[str, Any] = {
        "path": tmp_path / "store",
        "pools": pools,
        "serials": [image if place.is_block_device() else "" for place in pools],
    }
    return StoreConfig.parse({**settings, "capacity": "64MiB", "segment": "1MiB"})


def head(device: Path) -> bytes:
    with open(device, "rb") as stream:
        return stream.read(1 << 20)


def init(config: StoreConfig) -> int:
    layout, catalog = open_layout(config, format_devices=True)
    catalog.close()
    return layout.segment_count


def round_trip(config: StoreConfig, count: int = 40) -> None:
    tokens, pages = list(range(count)), os.urandom(count * PAGE_BYTES)
    with PrefixStore.open(config) as store:
        namespace = store.namespace(model="m", page_bytes=PAGE_BYTES, page_tokens=1)
        assert namespace.save(tokens, pages).wait(30).all()
    with PrefixStore.open(config) as store:
        namespace = store.namespace(model="m", page_bytes=PAGE_BYTES, page_tokens=1)
        target = bytearray(len(pages))
        assert namespace.load(tokens, target).wait(30).all()
        assert target == pages


def test_an_unformatted_device_is_refused_untouched(tmp_path: Path, device: Path) -> None:
    config = config_for(tmp_path, device)
    with pytest.raises(ConfigError, match="--format-device"):
        PrefixStore.open(config)
    assert not any(head(device))
    assert not config.path.exists()


def test_pages_survive_on_a_formatted_device(tmp_path: Path, device: Path) -> None:
    config = config_for(tmp_path, device)
    assert init(config) == 31, "1 MiB of 32 is the header's"
    round_trip(config)


def test_pages_stripe_over_a_device_and_a_directory(tmp_path: Path, device: Path) -> None:
    config = config_for(tmp_path, device, tmp_path / "other")
    init(config)
    round_trip(config)
    for pool in (device, tmp_path / "other" / "pool.tutti"):
        with open(pool, "rb") as stream:
            stream.seek(1 << 20)
            assert any(stream.read(PAGE_BYTES)), f"nothing in {pool}"


@pytest.mark.parametrize("where", [0, 4096, (1 << 20) - 1, SIZE - 1, SIZE - (1 << 20)])
def test_data_at_either_end_is_a_sign_of_use(tmp_path: Path, device: Path, where: int) -> None:
    with open(device, "r+b") as stream:
        stream.seek(where)
        stream.write(b"\1")
    before = head(device)
    with pytest.raises(ConfigError, match="not taken"):
        init(config_for(tmp_path, device))
    assert head(device) == before


def test_a_file_system_is_a_sign_of_use(tmp_path: Path, device: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is missing")
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    with pytest.raises(ConfigError, match="not taken"):
        init(config_for(tmp_path, device))


def test_a_device_held_by_somebody_is_refused(tmp_path: Path, device: Path) -> None:
    held = os.open(device, os.O_RDONLY | os.O_EXCL)  # what a mount does
    try:
        with pytest.raises(ConfigError, match="mounted or in use"):
            init(config_for(tmp_path, device))
    finally:
        os.close(held)
    assert not any(head(device))


def test_a_discarded_device_is_blank_again(tmp_path: Path, device: Path) -> None:
    config = config_for(tmp_path, device)
    init(config)
    round_trip(config)
    discard_store(config)
    assert not any(head(device))
    init(config)


# ---- which disk it is ----
def open_as(tmp_path: Path, place: Path, serial: str = "") -> None:
    """Open the store of `config_for` with its device named in another way."""
    config = config_for(tmp_path, place)
    serials = (serial,) if serial else ()
    PrefixStore.open(config.model_copy(update={"serials": serials})).close()


def test_a_name_that_may_stand_for_another_disk_is_not_enough(tmp_path: Path, device: Path) -> None:
    """/dev/nvme0n1 may be another disk after the next start; the message says the right one."""
    init(config_for(tmp_path, device))
    before = head(device)
    with pytest.raises(ConfigError, match=r"another disk may have tomorrow.*by-id.*disk\.img"):
        open_as(tmp_path, device)
    assert head(device) == before


def test_another_serial_number_is_another_disk(tmp_path: Path, device: Path) -> None:
    init(config_for(tmp_path, device))
    with pytest.raises(ConfigError, match=r"another disk: its serial number is '.*', not 'S1234'"):
        open_as(tmp_path, device, "S1234")
    open_as(tmp_path, device, str(tmp_path / "disk.img"))


def test_a_disk_without_a_number_has_no_right_one(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_device, "serials_of", lambda device: ())
    with pytest.raises(ConfigError, match=r"serial number is not known, not '.*disk\.img'"):
        init(config_for(tmp_path, device))
    assert not any(head(device))


def test_a_link_in_the_directory_of_disks_is_enough(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /dev/disk/by-id has them: links that are made new at each start."""
    by_id = tmp_path / "by-id"
    by_id.mkdir()
    (by_id / "nvme-MAKER_S1234").symlink_to(device)
    config = config_for(tmp_path, by_id / "nvme-MAKER_S1234").model_copy(update={"serials": ()})
    with pytest.raises(ConfigError, match="another disk may have tomorrow"):
        init(config)
    monkeypatch.setattr(block_device, "BY_ID", by_id)
    init(config)
    round_trip(config)
    layout, catalog = open_layout(config)
    catalog.close()
    assert layout.paths == (device,), "the transports get the node, not the link"
    assert verify_store(config.path, config.pools).clean
    discard_store(config)
    assert not any(head(device))


def test_a_link_that_another_user_made_is_not_followed(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id = tmp_path / "by-id"
    by_id.mkdir()
    (by_id / "disk").symlink_to(device)
    os.chown(by_id / "disk", 54321, 54321, follow_symlinks=False)
    monkeypatch.setattr(block_device, "BY_ID", by_id)
    with pytest.raises(ConfigError, match="belongs to user 54321"):
        init(config_for(tmp_path, by_id / "disk").model_copy(update={"serials": ()}))
    assert not any(head(device))


@pytest.mark.parametrize(
    ("serials", "said"),
    [(("a", "b"), "2 of them for 1 pools"), (("S1",), "'S1' for .*, which is no block device")],
)
def test_serial_numbers_have_to_fit_the_pools(tmp_path: Path, serials: Any, said: str) -> None:
    settings: dict[str, Any] = {"path": tmp_path / "store", "capacity": "64MiB"}
    with pytest.raises(ConfigError, match=said):
        PrefixStore.open(StoreConfig.parse({**settings, "serials": serials}))
    assert not (tmp_path / "store").exists()


def test_serial_numbers_come_from_the_environment_too() -> None:
    names = {"PATH": "/a", "CAPACITY": "64MiB", "POOLS": "/dev/x:/b", "SERIALS": "S1:"}
    environment = {f"TUTTI_STORE_{name}": value for name, value in names.items()}
    config = StoreConfig.from_environment(environment)
    assert config.pools == (Path("/dev/x"), Path("/b")) and config.serials == ("S1", "")


# ---- what the kernel says of a device, on a stand-in of its files ----
class Sysfs:
    """A stand-in for /sys/dev/block, in which /dev/null is the device."""

    def __init__(self, folder: Path) -> None:
        self.device = Path(os.devnull)
        number = os.stat(self.device).st_rdev
        self.disk = folder / "devices" / "disk"
        self.link = folder / f"{os.major(number)}:{os.minor(number)}"
        self.disk.mkdir(parents=True)
        self.link.symlink_to(self.disk)

    def write(self, name: str, data: str | bytes) -> None:
        file = self.disk / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())

    def be_partition(self, number: int) -> None:
        """The device is a partition of the disk."""
        self.write("disk1/partition", f"{number}\n")
        self.link.unlink()
        self.link.symlink_to(self.disk / "disk1")


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    monkeypatch.setattr(block_device, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(block_device, "SWAPS", tmp_path / "swaps")
    return Sysfs(tmp_path / "sys")


@pytest.mark.parametrize(
    ("name", "data", "serial"),
    [
        ("device/serial", "S4EV 01 \n", "S4EV 01"),  # NVMe pads with blanks
        ("serial", "vol-0123", "vol-0123"),
        ("wwid", "eui.0025385b71\n", "eui.0025385b71"),
        ("device/vpd_pg80", b"\0\x80\0\x08WD-WX123", "WD-WX123"),
        ("dm/uuid", "LVM-abc\n", "LVM-abc"),
    ],
)
def test_each_kind_of_disk_says_its_number(sysfs: Sysfs, name: str, data: Any, serial: str) -> None:
    assert block_device.serials_of(sysfs.device) == ()
    sysfs.write(name, data)
    assert block_device.serials_of(sysfs.device) == (serial,)
    sysfs.be_partition(3)
    assert block_device.serials_of(sysfs.device) == (f"{serial}-part3",)


def test_a_device_that_nobody_uses(sysfs: Sysfs) -> None:
    sysfs.write("ro", "0\n")
    (sysfs.disk / "holders").mkdir()
    assert block_device.why_in_use(sysfs.device) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("holders/md0", "another device is built on it"),
        ("disk1/partition", "it has partitions"),
        ("ro", "it is read-only"),
    ],
)
def test_signs_of_use(sysfs: Sysfs, name: str, said: str) -> None:
    sysfs.write(name, "1\n")
    assert block_device.why_in_use(sysfs.device) == said


def test_swap_space_is_in_use(tmp_path: Path, device: Path, monkeypatch) -> None:
    swaps = tmp_path / "swaps"
    swaps.write_text(f"Filename\tType\n/gone   partition 1\n{device}     partition\t1 0 -2\n")
    monkeypatch.setattr(block_device, "SWAPS", swaps)
    with pytest.raises(ConfigError, match="it is swap space"):
        init(config_for(tmp_path, device))
    assert not any(head(device))


# ---- what lies on it ----
@pytest.mark.parametrize("kind", ["ext4", "swap", "partitions", "vmfs"])
def test_what_blkid_finds_is_named(tmp_path: Path, device: Path, kind: str) -> None:
    if shutil.which("blkid") is None:
        pytest.skip("this machine has no loop devices with such a content: no blkid")
    ext4 = bytearray(1024)
    ext4[0x38:0x3A] = b"\x53\xef"  # magic
    ext4[0x60:0x64] = (0x40).to_bytes(4, "little")  # extents
    ext4[0x5C:0x60] = (0x4).to_bytes(4, "little")  # journal
    partition = bytes([0, 0, 2, 0, 0x83, 0, 0, 0]) + (2048).to_bytes(4, "little") * 2
    contents = {
        "ext4": {1024: bytes(ext4)},
        "swap": {1024: (1).to_bytes(4, "little") + (8191).to_bytes(4, "little"),
                 4086: b"SWAPSPACE2"},
        "partitions": {446: partition, 510: b"\x55\xaa"},
        # Behind the first MiB, of which zeros would say nothing.
        "vmfs": {1 << 20: bytes.fromhex("0dd001c0")},
    }[kind]  # fmt: skip
    with open(device, "r+b") as stream:
        for offset, data in contents.items():
            stream.seek(offset)
            stream.write(data)
    said = {"partitions": "dos"}.get(kind, kind)
    before = head(device)
    with pytest.raises(ConfigError, match=f"(?i)not taken: it holds .*{said}"):
        init(config_for(tmp_path, device))
    assert head(device) == before


def test_without_blkid_the_ends_are_looked_at(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_device, "_SYSTEM_PATH", str(tmp_path))
    with open(device, "r+b") as stream:
        stream.write(b"\1")
    with pytest.raises(ConfigError, match="first or last MiB is not empty"):
        init(config_for(tmp_path, device))
    with open(device, "r+b") as stream:
        stream.write(b"\0")
    init(config_for(tmp_path, device))


def test_a_mounted_file_system_is_in_use(tmp_path: Path, device: Path) -> None:
    mount = ["mount", str(device), str(tmp_path)]
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("this machine has no loop devices with a file system: no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine has no loop devices that can be mounted: {made.stderr.strip()}")
    try:
        assert block_device.why_in_use(device).startswith("it is mounted or in use")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


# ---- each time it is opened ----
def test_a_device_of_ours_that_is_mounted_is_left_alone(tmp_path: Path, device: Path) -> None:
    """Something was built on a disk that once was ours; its superblock is still there."""
    config = config_for(tmp_path, device)
    init(config)
    held = os.open(device, os.O_RDONLY | os.O_EXCL)
    try:
        for use in (PrefixStore.open, discard_store):
            with pytest.raises(ConfigError, match="mounted or in use"):
                use(config)
    finally:
        os.close(held)
    round_trip(config)


@pytest.mark.parametrize("where", [4096, 65536, (1 << 20) - 1])
def test_a_device_that_somebody_has_written_to_is_left_alone(
    tmp_path: Path, device: Path, where: int
) -> None:
    """Some file systems begin behind the superblock of ours, which they leave as it is."""
    config = config_for(tmp_path, device)
    init(config)
    with open(device, "r+b") as stream:
        stream.seek(where)
        stream.write(b"_BHRfS_M")
    with pytest.raises(ConfigError, match="written behind its superblock"):
        PrefixStore.open(config)


def test_processes_of_one_store_share_a_device(tmp_path: Path, device: Path) -> None:
    config = config_for(tmp_path, device).model_copy(update={"writers_max": 2})
    init(config)
    code = (
        "import sys; from tutti_core import PrefixStore, StoreConfig\n"
        "store = PrefixStore.open(StoreConfig.model_validate_json(sys.argv[1]))\n"
        "print(store._lease.number, flush=True); sys.stdin.readline(); store.close()\n"
    )
    text = config.model_dump_json()
    with PrefixStore.open(config) as store:
        others = [
            subprocess.Popen(
                [sys.executable, "-c", code, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        numbers = {other.stdout.readline().strip() for other in others}  # type: ignore[union-attr]
        assert numbers == {"1", "2"} and store._lease.number == 0
        for other in others:
            other.communicate("\n", timeout=30)
            assert other.returncode == 0


def test_the_command_takes_serial_numbers(tmp_path: Path, device: Path, capsys) -> None:
    common = ["init", str(tmp_path / "store"), "--capacity", "64MiB", "--segment", "1MiB"]
    common += ["--pool", str(device), "--format-device"]
    assert main(common) == 2 and "--serial" in capsys.readouterr().err
    assert main([*common, "--serial", str(tmp_path / "disk.img")]) == 0
    round_trip(config_for(tmp_path, device))
