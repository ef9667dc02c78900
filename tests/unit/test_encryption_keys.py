"""Where the key of a store comes from, what is refused, and that it goes nowhere else."""

from __future__ import annotations

import base64
import copy
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encryption_kit import KEY, encrypted_config, key_file, open_encrypted, pages_of, random_pages
from store_kit import finish, open_small, run

from tutti_core import ConfigError, PrefixStore, StoreConfig, UnsupportedError, cli
from tutti_core.errors import TuttiError
from tutti_core.format import SUPERBLOCK_BYTES, Superblock
from tutti_core.tiers.encryption import (
    KEY_VARIABLE,
    Keyring,
    MasterKey,
    PageKeyring,
    find_key,
)

OTHER = bytes(range(32))


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def config(folder: Path, **settings: Any) -> StoreConfig:
    return StoreConfig.parse({"path": folder / "s", "capacity": "16MiB", **settings})


def found(folder: Path, **settings: Any) -> MasterKey | None:
    return find_key(config(folder, **settings))


def files_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# ---- reading ----
@pytest.mark.parametrize(
    "text",
    [
        KEY.hex(),
        KEY.hex().upper(),
        f"  {KEY.hex()}\r\n",
        base64.b64encode(KEY).decode(),
        base64.b64encode(KEY).decode().rstrip("="),
        base64.urlsafe_b64encode(KEY).decode(),
    ],
)
def test_a_key_in_hexadecimal_or_base64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = key_file(tmp_path)
    file.write_text(text)
    assert found(tmp_path, encryption_key_file=file) == MasterKey(KEY)
    monkeypatch.setenv(KEY_VARIABLE, text)
    assert found(tmp_path) == MasterKey(KEY)
    assert found(tmp_path, encryption_key_file=file) == MasterKey(KEY)  # the same twice


def test_no_key_is_no_key(tmp_path: Path) -> None:
    assert found(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        KEY.hex()[:-1],
        KEY.hex()[:-2],
        KEY.hex() + "00",
        KEY.hex()[:-1] + "g",
        base64.b64encode(KEY[:31]).decode(),
        base64.b64encode(KEY + b"x").decode(),
        base64.b64encode(KEY).decode()[:-2] + "*=",
        "passphrase",
        "ü" * 64,
        KEY.hex() + "\n" + OTHER.hex(),
        "\0" * 32,
        "00" * 32,
        "ff" * 32,
        "A" * 5000,
    ],
)
def test_what_is_no_key_is_refused_with_the_remedy_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = key_file(tmp_path)
    file.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        found(tmp_path, encryption_key_file=file)
    assert str(file) in str(caught.value)
    assert len(text.strip()) < 3 or text.strip() not in str(caught.value)
    if "\0" not in text:
        monkeypatch.setenv(KEY_VARIABLE, text)
        with pytest.raises(ConfigError, match=KEY_VARIABLE):
            found(tmp_path)


def test_binary_in_a_key_file_is_refused(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    file.write_bytes(KEY)
    with pytest.raises(ConfigError, match="openssl"):
        found(tmp_path, encryption_key_file=file)


def test_two_different_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, OTHER.hex())
    with pytest.raises(ConfigError, match="different keys") as caught:
        found(tmp_path, encryption_key_file=key_file(tmp_path))
    assert OTHER.hex() not in str(caught.value) and KEY.hex() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = key_file(tmp_path)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        found(tmp_path, encryption_key_file=file)
    file.chmod(0o400)
    assert found(tmp_path, encryption_key_file=file) == MasterKey(KEY)


def test_a_link_a_directory_a_pipe_and_nothing_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(key_file(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, said in (
        ("link", "symbolic link"),
        ("folder", "not a file"),
        ("pipe", "not a file"),
        ("nothing", "No such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            found(tmp_path, encryption_key_file=tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        found(tmp_path, encryption_key_file=file)


def test_a_file_that_others_could_exchange_is_refused(tmp_path: Path) -> None:
    """Whoever can choose the key of a new store can read it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"encryption_key_file.*written by others"):
        found(tmp_path, encryption_key_file=key_file(folder))
    assert found(tmp_path, encryption_key_file=folder / "key", trust_path=True) is not None


@pytest.mark.parametrize("value", ["", 3, True, ["a"], "a\0b"])
def test_impossible_settings(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"encryption_key_file|cannot be the name"):
        config(tmp_path, encryption_key_file=value)


def test_gpu_direct_storage_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host memory.*auto"):
        found(tmp_path, encryption_key_file=key_file(tmp_path), transport="gds")


# ---- opening ----
def refused(path: Path, said: str, **settings: Any) -> None:
    """Opening fails with these words, and touches nothing."""
    settings.setdefault("segments", 16)
    before = files_of(path)
    with pytest.raises(ConfigError, match=said) as caught:
        open_small(path, segment=128 << 10, **settings)
    assert caught.value.hint
    assert files_of(path) == before


def test_only_the_store_s_own_key_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, (5000,)).save(run("a", 3), random_pages(3, 5000))).all()
    with open_small(tmp_path / "plain", segments=16, segment=128 << 10):
        pass
    refused(tmp_path / "s", "is encrypted, and no key is given")
    other = key_file(tmp_path, OTHER, "other")
    refused(tmp_path / "s", "encrypted with another key", encryption_key_file=other)
    refused(tmp_path / "plain", "is not encrypted", encryption_key_file=other)
    monkeypatch.setenv(KEY_VARIABLE, OTHER.hex())
    refused(tmp_path / "s", "encrypted with another key")
    refused(tmp_path / "plain", "is not encrypted")
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    with open_small(tmp_path / "s", segments=16, segment=128 << 10) as store:
        target = np.zeros((3, 5000), dtype=np.uint8)
        assert finish(pages_of(store, (5000,)).load(run("a", 3), target)).all()


def test_every_pool_is_checked_and_growing_keeps_the_check(tmp_path: Path) -> None:
    pools = (tmp_path / "p", tmp_path / "q")
    with open_encrypted(tmp_path / "s", pools=pools):
        pass
    with open_encrypted(tmp_path / "s", pools=pools, segments=20) as store:
        assert store._manager.layout.segment_count == 40
    decoded = [
        Superblock.decode((pool / "pool.tutti").read_bytes()[:SUPERBLOCK_BYTES], "p")
        for pool in pools
    ]
    assert decoded[0].key_check == decoded[1].key_check != b""
    with open_encrypted(tmp_path / "s", pools=pools, segments=20):
        pass
    with open(pools[1] / "pool.tutti", "r+b") as stream:  # as if it were another store's
        stream.write(Superblock(**{**_fields(decoded[1]), "key_check": b""}).encode())
    refused(
        tmp_path / "s",
        "is not encrypted",
        pools=pools,
        segments=20,
        encryption_key_file=tmp_path / "key",
    )


def _fields(superblock: Superblock) -> dict[str, Any]:
    return {name: getattr(superblock, name) for name in Superblock.__slots__}


def test_an_older_tutti_refuses_an_encrypted_store(tmp_path: Path) -> None:
    """It refuses any flag, before it looks at anything else; this is its rule."""
    with open_encrypted(tmp_path / "s"):
        pass
    raw = (tmp_path / "s" / "pool.tutti").read_bytes()[:SUPERBLOCK_BYTES]
    assert int.from_bytes(raw[12:16], "little") == 1
    unknown = bytearray(raw)
    unknown[12] = 2
    with pytest.raises(UnsupportedError, match="flags 2"):
        Superblock.decode(bytes(unknown), "pool")
    assert Keyring(MasterKey(KEY), raw[16:32]).check == raw[80:96]


def test_init_makes_encrypted_stores_and_forgets_none_for_a_bad_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(key: Path, *options: str) -> int:
        arguments = [str(tmp_path / "s"), "--capacity", "16MiB", "--encryption-key-file", str(key)]
        return cli.main(["init", *arguments, *options])

    first, second = key_file(tmp_path), key_file(tmp_path, OTHER, "second")
    assert init(first) == 0 and "not encrypted" not in capsys.readouterr().out
    assert cli.main(["info", str(tmp_path / "s")]) == 0
    assert "not encrypted" not in capsys.readouterr().out
    before = files_of(tmp_path / "s")
    assert init(second) == cli.EXIT_ERROR and "another key" in capsys.readouterr().err
    assert init(tmp_path / "nothing", "--discard") == cli.EXIT_ERROR
    assert files_of(tmp_path / "s") == before
    assert init(second, "--discard") == 0
    assert init(second) == 0 and init(first) == cli.EXIT_ERROR


# ---- that it stays where it is ----
def test_the_key_is_in_no_text_and_in_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = encrypted_config(tmp_path / "s", dram="4MiB")
    texts = [repr(settings), str(settings), settings.model_dump_json()]
    with PrefixStore.open(settings) as store:
        pages = pages_of(store, (5000,))
        assert finish(pages.save(run("a", 3), random_pages(3, 5000))).all()
        layout, entry = store._manager.layout, pages._entry
        texts += [repr(store.stats()), repr(store), repr(layout), str(vars(store._manager))]
        texts += [repr(entry), repr(entry.cipher), repr(layout.keyring)]
        texts += [repr(MasterKey(KEY)), str(MasterKey(KEY)), f"{MasterKey(KEY)}"]
        texts += [repr(entry.cipher._keys)]  # type: ignore[union-attr]
        namespace_key = entry.cipher._keys._namespace_key  # type: ignore[union-attr]
    for text in [*texts, caplog.text]:
        for secret in (KEY, namespace_key):
            assert secret.hex() not in text and repr(secret)[2:-1] not in text
    for data in files_of(tmp_path / "s").values():
        for secret in (KEY, namespace_key):
            assert secret not in data and secret.hex().encode() not in data


def test_a_key_is_neither_pickled_nor_copied_nor_hashed() -> None:
    for change in (pickle.dumps, copy.copy, copy.deepcopy, hash):
        with pytest.raises(TypeError):
            change(MasterKey(KEY))
    assert MasterKey(KEY) != KEY and MasterKey(KEY) == MasterKey(KEY) != MasterKey(OTHER)


# ---- derivation ----
def test_every_derived_key_is_another() -> None:
    stores = [Keyring(MasterKey(key), store) for key in (KEY, OTHER) for store in (b"a", b"b")]
    derived = {keyring.check for keyring in stores}
    spaces = [keyring.namespace(name) for keyring in stores for name in (b"m" * 16, b"n" * 16)]
    derived |= {space._namespace_key for space in spaces}
    derived |= {space.reading(salt) for space in spaces for salt in (b"1" * 16, b"2" * 16)}
    assert len(derived) == 4 + 8 + 16


def test_a_page_key_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_core.tiers.encryption.SEALS_PER_KEY_MAX", 10)
    keys = PageKeyring(KEY)
    salts = [keys.writing(4)[1] for _ in range(5)]
    assert salts[0] == salts[1] != salts[2] == salts[3] != salts[4]
    assert keys.writing(4)[0] == keys.reading(salts[4])


# ---- without the package ----
def test_without_the_package_encryption_is_refused_and_the_rest_works(tmp_path: Path) -> None:
    key_file(tmp_path)
    program = """
import sys
from pathlib import Path
sys.modules["cryptography"] = None
from tutti_core import PrefixStore, UnsupportedError
folder = Path(sys.argv[1])
try:
    PrefixStore.open(folder / "s", capacity="16MiB", encryption_key_file=folder / "key")
except UnsupportedError as error:
    assert "pip install" in str(error), error
    assert not (folder / "s").exists()
else:
    raise SystemExit("opened")
with PrefixStore.open(folder / "plain", capacity="16MiB") as store:
    pages = store.namespace(model="m", page_tokens=1, page_bytes=4096)
    assert pages.save([1], bytes(range(256)) * 16).wait().all()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)


def test_all_errors_are_of_tutti(tmp_path: Path) -> None:
    with pytest.raises(TuttiError):
        open_small(tmp_path / "s", encryption_key_file=tmp_path / "nothing")
