"""Raw block devices as pools, on loop devices: guarded against every sign of use, then usable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti_core import ConfigError, PrefixStore, StoreConfig
from tutti_core.tiers.pools import discard_store, open_layout

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
    return StoreConfig.parse(
        {"path": tmp_path / "store", "pools": pools, "capacity": "64MiB", "segment": "1MiB"}
    )


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
    with pytest.raises(ConfigError, match="not empty"):
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
