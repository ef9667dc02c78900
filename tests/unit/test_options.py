"""SGLang's extra config becomes store settings, or an error that names what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutti_core import ConfigError
from tutti_sglang.options import PREFIX_KEYS, RANK_DRAFTS, parse_options

GOOD: dict[str, Any] = {"path": "/nowhere", "capacity": "2GiB"}


def test_defaults() -> None:
    options = parse_options(GOOD, writers=4)
    assert options.store.capacity == 2 << 30
    assert options.store.writers_max == 4
    assert (options.weights, options.tenant) == (None, "")
    assert not options.passes_prefix_keys


def test_what_the_plugin_adds_is_not_an_option_of_the_operator() -> None:
    plumbing = {"backend_name": "tutti", "module_path": "m", "class_name": "c", "interface_v1": 1}
    hooks = {PREFIX_KEYS: True, RANK_DRAFTS: True}
    options = parse_options({**GOOD, **plumbing, **hooks}, writers=1)
    assert options.passes_prefix_keys and options.backs_up_drafts and options.zero_copy
    bare = parse_options(GOOD, writers=1)
    assert not (bare.passes_prefix_keys or bare.backs_up_drafts or bare.zero_copy)


def test_sglang_file_storage_path_is_the_default_path() -> None:
    config = {"capacity": "2GiB", "file_storage_path": "/a"}
    assert parse_options(config, 1).store.path == Path("/a")
    assert parse_options({**config, "path": "/b"}, 1).store.path == Path("/b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capactiy": "2GiB"}, ["capactiy", "capacity"]),
        ({"tennant": "a"}, ["tennant", "tenant"]),
        ({"capacity": "two"}, ["capacity", "two"]),
        ({"capacity": "1KiB"}, ["capacity", "segment"]),
        ({"transport": "pigeon"}, ["transport", "pigeon", "uring"]),
        ({"tenant": 7}, ["tenant", "7"]),
        ({"weights": ["x"]}, ["weights"]),
        ({"operation_timeout_s": 0}, ["operation_timeout_s", "0"]),
        ({"operation_timeout_s": True}, ["operation_timeout_s"]),
        ({"operation_timeout_s": "soon"}, ["operation_timeout_s", "soon"]),
        ({"writers_max": 0}, ["writers_max", "0"]),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({**GOOD, **change}, writers=1)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("missing", ["path", "capacity"])
def test_required_options_are_asked_for(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        parse_options({k: v for k, v in GOOD.items() if k != missing}, writers=1)
