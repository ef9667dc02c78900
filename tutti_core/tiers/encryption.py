"""Keys of an encrypted store: read from a file or the environment, derived, checked at open.

    master key      32 bytes of the operator's; nothing is encrypted with it
    key check       tells at open whether the master key is the store's
    namespace key   one for each namespace of the store
    page key        one for each opening of a namespace, and again after SEALS_PER_KEY_MAX units

All are derived with HKDF-SHA256. Page keys come from a random salt that is stored with what they
encrypted, so processes need not agree on a counter, and none of them encrypts more with one key
than random nonces are good for, however long the store lives.
Nothing here writes a key anywhere, logs it or puts it into an error.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Any, NoReturn

from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError, InternalError, UnsupportedError
from tutti_core.format import KEY_CHECK_BYTES, Superblock
from tutti_core.tiers import trust

KEY_BYTES = 32
SALT_BYTES = 16
KEY_VARIABLE = "TUTTI_ENCRYPTION_KEY"
SEALS_PER_KEY_MAX = 1 << 28
"""Units (pages, or parts of pages) that one key encrypts. Two of them then have the same random
nonce of 96 bits with a probability below 2^-41."""

READ_KEYS_MAX = 1024
"""Page keys that a namespace remembers; deriving one again costs about 10 us."""

_KEY_FILE_MAX_BYTES = 4096
_HOW_TO_MAKE = "make one with `openssl rand -hex 32 > FILE` and `chmod 600 FILE`"


class MasterKey:
    """The operator's key. Does not show itself, and cannot be pickled or copied into a file."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MasterKey) and hmac.compare_digest(self._data, other._data)

    def __hash__(self) -> NoReturn:
        raise TypeError("a key is not hashed")

    def __repr__(self) -> str:
        return "MasterKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled")

    def derive(self, store_id: bytes, purpose: bytes) -> bytes:
        """32 bytes that only whoever has this key can make, for one purpose in one store."""
        return _hkdf(self._data, store_id, purpose)


class Keyring:
    """The keys of one store. Threads: any."""

    def __init__(self, master: MasterKey, store_id: bytes) -> None:
        self._master = master
        self._store_id = store_id

    def __repr__(self) -> str:
        return "Keyring(...)"

    @property
    def check(self) -> bytes:
        """What the superblock has of the key: not enough to find it."""
        return self._master.derive(self._store_id, b"tutti key check")[:KEY_CHECK_BYTES]

    def namespace(self, digest: bytes) -> PageKeyring:
        """The keys of one namespace."""
        return PageKeyring(self._master.derive(self._store_id, b"tutti namespace " + digest))


class PageKeyring:
    """The page keys of one namespace: the one that encrypts now, and those that pages name.

    Threads    any.
    """

    def __init__(self, namespace_key: bytes) -> None:
        self._namespace_key = namespace_key
        self._lock = threading.Lock()
        self._salt = b""
        self._left = 0
        self.reading = functools.lru_cache(READ_KEYS_MAX)(self._derive)
        """The page key of a salt."""

    def __repr__(self) -> str:
        return "PageKeyring(...)"

    def writing(self, count: int) -> tuple[bytes, bytes]:
        """A page key and its salt, good for `count` units more, which are counted."""
        with self._lock:
            if self._left < count:
                self._salt = secrets.token_bytes(SALT_BYTES)
                self._left = SEALS_PER_KEY_MAX
            self._left -= count
            salt = self._salt
        return self.reading(salt), salt

    def _derive(self, salt: bytes) -> bytes:
        return _hkdf(self._namespace_key, salt, b"tutti pages")


# ---- finding the key ----
def find_key(config: StoreConfig) -> MasterKey | None:
    """The key that a configuration and the environment name; None: they name none.

    Raises
        ConfigError: it cannot be read, is no key, others may read it, or there are two.
        UnsupportedError: the package that encrypts is not installed.
    """
    text = os.environ.get(KEY_VARIABLE)
    in_environment = None if text is None else _parse(text, KEY_VARIABLE)
    in_file = None
    if config.encryption_key_file is not None:
        in_file = _read(config.encryption_key_file, config.trust_path)
    if in_file is not None and in_environment is not None and in_file != in_environment:
        raise ConfigError(
            f"encryption_key_file and {KEY_VARIABLE} have different keys",
            hint="leave one of them out",
        )
    key = in_file or in_environment
    if key is not None:
        if config.transport == "gds":
            raise ConfigError(
                'transport = "gds" reads into GPU memory, and pages are decrypted in host memory',
                hint='use transport "auto" with an encryption key; the direct route then goes by '
                "way of staging",
            )
        check_library()
    return key


def _parse(text: str, where: str) -> MasterKey:
    """Read 64 hexadecimal digits, or 32 bytes in base64."""
    text = text.strip()
    data = b""
    try:
        if len(text) == 2 * KEY_BYTES and not set(text) - set("0123456789abcdefABCDEF"):
            data = bytes.fromhex(text)
        else:
            raw = text.encode("ascii").replace(b"-", b"+").replace(b"_", b"/")
            data = base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (ValueError, binascii.Error):
        pass
    if len(data) != KEY_BYTES:
        raise ConfigError(
            f"{where} is no encryption key: {len(text)} characters that are not {KEY_BYTES} bytes "
            "in hexadecimal or base64",
            hint=_HOW_TO_MAKE,
        ) from None
    if len(set(data)) == 1:
        raise ConfigError(f"{where} is one byte repeated, and no key", hint=_HOW_TO_MAKE)
    return MasterKey(data)


def _read(file: Path, trusting: bool) -> MasterKey:
    """Read a key file that only we can read, in a place where only we or root can exchange it."""
    where = f"encryption_key_file {str(file)!r}"
    try:
        trust.check_directory(file.absolute().parent, trusting=trusting)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if file.is_symlink():
            raise ConfigError(f"{where} is a symbolic link", hint="name the file itself") from None
        raise ConfigError(f"{where} cannot be read: {error.strerror}", hint=_HOW_TO_MAKE) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{where} is not a file", hint=_HOW_TO_MAKE)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{where} belongs to user {status.st_uid}, and this is user {os.geteuid()}",
                hint=f"`chown {os.geteuid()} {file}`",
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{where} has mode {status.st_mode & 0o777:03o}: others may use it",
                hint=f"`chmod 600 {file}`",
            )
        data = os.read(descriptor, _KEY_FILE_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return _parse(data.decode("ascii", "replace"), where)


def keyring_for(key: MasterKey | None, superblock: Superblock, where: str) -> Keyring | None:
    """The keys of a store that exists; None: it is not encrypted.

    Raises
        ConfigError: the key is another one, is missing, or there is nothing to decrypt.
    """
    if not superblock.key_check:
        if key is None:
            return None
        raise ConfigError(
            f"{where} is not encrypted, and an encryption key is given",
            device=where,
            hint=f"leave out encryption_key_file and {KEY_VARIABLE}, or make an encrypted store at "
            "another path",
        )
    if key is None:
        raise ConfigError(
            f"{where} is encrypted, and no key is given",
            device=where,
            hint=f"set encryption_key_file or {KEY_VARIABLE}",
        )
    keyring = Keyring(key, superblock.store_id)
    if not hmac.compare_digest(keyring.check, superblock.key_check):
        raise ConfigError(
            f"{where} is encrypted with another key",
            device=where,
            hint="give the key that it was created with; `tutti init --discard` makes the store "
            "anew, with the key given, and forgets its pages",
        )
    return keyring


# ---- the package that encrypts ----
def check_library() -> None:
    """See that pages can be encrypted here.

    Raises
        UnsupportedError: the package `cryptography` is missing.
        InternalError: it does not do in place what it does elsewhere.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise UnsupportedError(
            f"encryption needs the package `cryptography`: {error}",
            hint='`pip install "tutti[encryption]"`, or `pip install cryptography`',
        ) from None
    # Pages are decrypted in place, a piece at a time, which the package allows and hardly promises.
    key, nonce, text = bytes(range(KEY_BYTES)), bytes(12), bytes(range(100))
    sealed = AESGCM(key).encrypt(nonce, text, b"aad")
    memory = bytearray(sealed[:-16])
    decryptor = new_decryptor(key, nonce, sealed[-16:])
    decryptor.authenticate_additional_data(b"aad")
    for piece in (memoryview(memory)[:37], memoryview(memory)[37:]):
        decryptor.update_into(piece, piece)
    decryptor.finalize()
    if memory != text:
        raise InternalError("`cryptography` does not decrypt in place")


def new_encryptor(key: bytes, nonce: bytes) -> Any:
    """An encryptor of one unit; its `tag` is there after `finalize`."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()


def new_decryptor(key: bytes, nonce: bytes, tag: bytes) -> Any:
    """A decryptor of one unit; `finalize` raises InvalidTag if anything about it is not right."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce, tag)).decryptor()


def _hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived: bytes = HKDF(hashes.SHA256(), KEY_BYTES, salt, info).derive(key)
    return derived
