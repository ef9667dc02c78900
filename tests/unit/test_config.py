"""config.py: every bad setting is refused with its name, its value and what is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from tutti_core import ConfigError, StoreConfig

MIB = 1 << 20


def parse(**settings: Any) -> StoreConfig:
    return StoreConfig.parse({"path": "/tmp/s", "capacity": "1GiB", **settings})


def test_defaults_are_within_their_own_bounds() -> None:
    config = parse()
    assert (config.segment_bytes, config.catalog_bytes) == (16 * MIB, 32 * MIB)
    assert config.pool_paths == (Path("/tmp/s"),)
    assert config.durability == "flush" and config.verify


@pytest.mark.parametrize(
    ("name", "near"),
    [("capcity", "capacity"), ("Segment", "segment"), ("writer_max", "writers_max")],
)
def test_unknown_setting_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{name}'.*did you mean '{near}'"):
        parse(**{name: 1})


def test_unknown_setting_without_a_near_name_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"valid names: .*capacity.*durability"):
        parse(qqqq=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transport": "urring"}, ["transport", "urring", "'posix'"]),
        ({"durability": "maybe"}, ["durability", "maybe", "'flush'"]),
        ({"preallocate": "some"}, ["preallocate", "some"]),
        ({"capacity": "lots"}, ["capacity", "lots"]),
        ({"capacity": -1}, ["capacity"]),
        ({"capacity": 0}, ["capacity = 0"]),
        ({"queue_depth": 0}, ["queue_depth", "0"]),
        ({"queue_depth": 1025}, ["queue_depth", "1025", "1024"]),
        ({"writers_max": 0}, ["writers_max", "0"]),
        ({"io_timeout_s": 0}, ["io_timeout_s", "0"]),
        ({"io_timeout_s": "nan"}, ["io_timeout_s"]),
        ({"io_timeout_s": "inf"}, ["io_timeout_s"]),
        ({"segment": 4097}, ["segment = 4097", "4096"]),
        ({"segment": 0}, ["segment = 0", "4096"]),
        ({"transfer_max": 1000}, ["transfer_max = 1000", "4096"]),
        ({"bounce": MIB}, ["bounce", "transfer_max"]),
        ({"catalog": 4096}, ["catalog = 4096", "2MiB"]),
        ({"verify": "perhaps"}, ["verify", "perhaps"]),
        ({"pools": 3}, ["pools", "3"]),
        ({"capacity": "9MiB"}, ["capacity = 9437184", "smaller than one segment"]),
        ({"segment": "1GiB", "capacity": "100MiB"}, ["capacity = 104857600", "smaller than one"]),
        ({"pools": [f"/tmp/p{i}" for i in range(99)], "capacity": "64MiB"}, ["capacity"]),
        ({"catalog": "2GiB"}, ["capacity", "smaller"]),
    ],
)
def test_bad_value_is_refused_by_name(settings: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**settings)
    for part in said:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("left_out", ["path", "capacity"])
def test_missing_setting_is_named(left_out: str) -> None:
    settings = {"path": "/tmp/s", "capacity": "1GiB"}
    del settings[left_out]
    with pytest.raises(ConfigError, match=f"'{left_out}' is required"):
        StoreConfig.parse(settings)


def test_several_bad_values_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(queue_depth=0, writers_max=0)
    assert "queue_depth" in str(caught.value) and "writers_max" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": "5MiB"},
        {"capacity": "100MiB", "segment": "1GiB"},
        {"capacity": "200GiB", "segment": "300GiB"},
        {"capacity": "64MiB", "pools": ("/tmp/a", "/tmp/b", "/tmp/c"), "segment": "64MiB"},
    ],
)
def test_the_capacity_that_an_error_recommends_is_accepted(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**settings)
    need = int(caught.value.hint.split("at least ")[1].split(" ")[0])
    assert parse(**{**settings, "capacity": need}).segments_per_pool(MIB) == 1
    with pytest.raises(ConfigError):
        parse(**{**settings, "capacity": need - 8192})


@pytest.mark.parametrize("capacity", ["16MiB", "1GiB", "500GB", "2TiB", "100TiB"])
@pytest.mark.parametrize("pools", [1, 3])
def test_everything_the_store_may_occupy_is_within_the_capacity(capacity: str, pools: int) -> None:
    config = parse(capacity=capacity, pools=[f"/tmp/p{i}" for i in range(pools)])
    each = MIB + config.segments_per_pool(MIB) * config.segment_bytes
    assert config.segments_per_pool(MIB) >= 1
    assert config.catalog_bytes + pools * each <= config.capacity


def test_settings_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"path": "/tmp/s", "capacity": "1GiB"}))
    (tmp_path / "a.toml").write_text('path = "/tmp/s"\ncapacity = "1GiB"\nverify = false\n')
    assert StoreConfig.load(tmp_path / "a.json") == parse()
    assert StoreConfig.load(tmp_path / "a.toml") == parse(verify=False)
    assert StoreConfig.load(tmp_path / "a.toml", verify=True) == parse()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "path: x", "unknown format"),
        ("a.json", "{", "a.json"),
        ("a.json", "[1]", "expected a table"),
        ("a.toml", "= 3", "a.toml"),
        ("a.json", '{"pth": 1}', "did you mean 'path'"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        StoreConfig.load(tmp_path / name)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json"):
        StoreConfig.load(tmp_path / "no.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b\.json"):
        StoreConfig.load(tmp_path / "b.json")


def test_settings_come_from_the_environment() -> None:
    values = {
        "TUTTI_STORE_PATH": "/tmp/s",
        "TUTTI_STORE_CAPACITY": "1GiB",
        "TUTTI_STORE_POOLS": "/tmp/a:/tmp/b:",
        "UNRELATED": "1",
    }
    assert StoreConfig.from_environment(values) == parse(pools=["/tmp/a", "/tmp/b"])
    with pytest.raises(ConfigError, match="did you mean 'durability'"):
        StoreConfig.from_environment({**values, "TUTTI_STORE_DURABILTY": "none"})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().verify = False  # type: ignore[misc]


def test_without_checksums_pages_must_be_flushed() -> None:
    """A power loss would otherwise leave records of pages that were never written."""
    settings = {"path": "/nowhere", "capacity": "2GiB", "verify": False}
    assert not StoreConfig.parse(settings).verify
    with pytest.raises(ConfigError, match="durability"):
        StoreConfig.parse({**settings, "durability": "none"})


# ---- raw drives ----
@pytest.mark.parametrize("name", ["nvme:SN1", "nvme:SN1/1", "pci:0000:01:00.0/1", "nvme", "pci"])
def test_the_name_of_a_raw_drive_is_refused_and_makes_no_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = {"path": str(tmp_path / "store"), "pools": [Path(name)]}
    for settings in ({"path": name}, {**inside, "pools": [name]}, inside):
        with pytest.raises(ConfigError, match="raw NVMe"):
            StoreConfig.parse({"capacity": "64MiB", **settings})
    with pytest.raises(ConfigError, match="raw NVMe"):
        StoreConfig.from_environment(
            {
                "TUTTI_STORE_PATH": str(tmp_path / "store"),
                "TUTTI_STORE_CAPACITY": "64MiB",
                "TUTTI_STORE_POOLS": name,
            }
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["./nvme:SN1", "/somewhere/nvme:SN1", "nvme-drive", "pcie"])
def test_directories_with_such_names_are_not(name: str) -> None:
    assert StoreConfig.parse({"path": name, "capacity": "64MiB"}).path == Path(name)
