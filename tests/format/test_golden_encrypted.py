"""Bytes of encrypted stores: they must decode and decrypt for ever, and be made the same.

The expected values were computed once by a program of its own from docs/format.md. If a test here
fails, what is on people's disks cannot be read any more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti_core import UnsupportedError
from tutti_core.format import FLAG_ENCRYPTED, TRAILER, TRAILER_BYTES, Superblock
from tutti_core.tiers import cipher as cipher_module
from tutti_core.tiers.cipher import PageCipher
from tutti_core.tiers.encryption import Keyring, MasterKey
from tutti_core.tiers.parts import layout_of_parts, stored_bytes

MASTER = bytes(range(100, 132))
STORE_ID = bytes(range(16))
DIGEST = bytes(range(32, 48))
PAGE_KEY = bytes(range(200, 216))
SALT = bytes(range(16, 32))
NONCE = bytes(range(64, 76))
PLAIN = bytes(i % 251 for i in range(100))

KEY_CHECK = bytes.fromhex("596c03e7a12dee59ec44f491c6576902")
NAMESPACE_KEY = bytes.fromhex("b1e1c052e3730d9fbe5a89ce7438b42b1888ca64fcaa7ea1abaf231230eca528")
PAGE_AES_KEY = bytes.fromhex("163cc6087fff06230e10e1b0d49bf5fd2e266f61ddc7da2d26952a8f5a1b55ac")
STORED = bytes.fromhex(
    "b27c146616411b9c533856ab7e1ba0a691e83f63ac78ea189a4b3c26c7f5f89bafaa81f6b6dac8ec"
    "f8a6eba5b8f325b49c4c191c9e03cc86ab4448e7419cf262aeebd12e08786b3eaa83f379d7dcfcec"
    "471d656d5de0a4f87e6c5b76bc0ef2d435c391b6315951a6ce7d6fc06c96b86aceb75df540414243"
    "4445464748494a4b00000000101112131415161718191a1b1c1d1e1f"
)
SUPERBLOCK_CHECK = bytes.fromhex("dc29e17ede0f2be8")

keyring = Keyring(MasterKey(MASTER), STORE_ID)


def test_constants() -> None:
    assert FLAG_ENCRYPTED == 1 and TRAILER_BYTES == 48
    assert [TRAILER.fields[name][1] for name in TRAILER.names] == [0, 16, 28, 32]
    assert stored_bytes(5000, None, 48) == 5048
    layout = layout_of_parts((5000, 4096, 4048), 48)
    assert layout is not None
    assert layout.offset_bytes == (4096, 12288, 20480) and layout.stored_bytes == 24576


def test_derived_keys() -> None:
    assert keyring.check == KEY_CHECK
    namespace = keyring.namespace(DIGEST)
    assert namespace._namespace_key == NAMESPACE_KEY
    assert namespace.reading(SALT) == PAGE_AES_KEY


def test_superblock_of_an_encrypted_store() -> None:
    superblock = Superblock(STORE_ID, bytes(16), 1, 3, 64 << 20, 1234, key_check=KEY_CHECK)
    golden = bytes.fromhex(
        "5455545449504f4c"  # TUTTIPOL
        "0200000001000000"  # format version, flags
        "000102030405060708090a0b0c0d0e0f"  # store id
        "00000000000000000000000000000000"  # secret
        "0100000003000000"  # this pool, pools
        "0000000400000000"  # segment size
        "d204000000000000"  # segments
        "0000100000000000"  # offset of segment 0
    )
    golden = (golden + KEY_CHECK).ljust(4088, b"\0") + SUPERBLOCK_CHECK
    assert superblock.encode() == golden
    assert Superblock.decode(golden, "pool") == superblock
    plain = replace(superblock, key_check=b"")
    assert Superblock.decode(plain.encode(), "pool") == plain
    assert plain.encode()[:12] == golden[:12] and not any(plain.encode()[80:4088])


@pytest.mark.parametrize("flags", [2, 3, 1 << 31])
def test_a_flag_that_is_not_known_is_refused(flags: int) -> None:
    raw = bytearray(Superblock(STORE_ID, bytes(16), 0, 1, 64 << 20, 1).encode())
    raw[12:16] = flags.to_bytes(4, "little")
    with pytest.raises(UnsupportedError, match=f"flags {flags}"):
        Superblock.decode(bytes(raw), "pool")


def test_a_stored_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page_cipher = PageCipher(keyring.namespace(DIGEST), DIGEST, len(PLAIN), None)
    keys = np.frombuffer(PAGE_KEY, dtype=np.uint8).reshape(1, 16)
    stored = np.frombuffer(STORED, dtype=np.uint8).copy()
    address = np.array([stored.ctypes.data], dtype=np.uint64)
    assert page_cipher.decrypt_stored(keys, address).all()
    assert stored[:100].tobytes() == PLAIN

    monkeypatch.setattr(cipher_module.os, "urandom", lambda count: NONCE[:count])
    monkeypatch.setattr(page_cipher._keys, "writing", lambda count: (PAGE_AES_KEY, SALT))
    memory, window = np.frombuffer(PLAIN, dtype=np.uint8), np.zeros((1, 4096), dtype=np.uint8)
    from tutti_core import PageFragments

    pages = PageFragments(
        np.array([[memory.ctypes.data]], dtype=np.uint64), np.array([100], dtype=np.uint64), memory
    )
    page_cipher.encrypt(keys, page_cipher.plain_form(pages), window)
    assert window[0, :148].tobytes() == STORED
