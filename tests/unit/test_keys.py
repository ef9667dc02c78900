"""keys.py: namespaces, salts and page keys that never mean two things."""

import itertools

import numpy as np
import pytest

from tutti_core import ConfigError, Namespace, PageKeys
from tutti_core.keys import encode_salt, token_array

BASE = {"model": "org/m", "page_bytes": 4096, "page_tokens": 16}
OTHERS = {
    "model": "org-m",
    "page_bytes": 8192,
    "page_tokens": 32,
    "weights": "v2",
    "dtype": "fp8",
    "layout": "page_first",
    "shard": "tp 0/2",
    "pool": "mamba",
    "key_bytes": 32,
    "extra": {"a": "b"},
    "parts": (96, 4000),
}


def test_every_field_of_a_namespace_is_part_of_its_digest() -> None:
    assert set(OTHERS) == {f for f in Namespace.__dataclass_fields__}
    variants = [Namespace(**BASE), *(Namespace(**{**BASE, k: v}) for k, v in OTHERS.items())]
    assert len({n.digest() for n in variants}) == len(variants)


def test_equal_namespaces_have_equal_digests_whatever_the_order_of_extra() -> None:
    a = Namespace(**BASE, extra={"x": "1", "y": "2"})
    b = Namespace(**BASE, extra={"y": "2", "x": "1"})
    assert a.digest() == b.digest() and len(a.digest()) == 16


def test_text_cannot_move_from_one_field_to_another() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ('a","layout":"', "c")]
    digests = {Namespace(**BASE, dtype=a, layout=b).digest() for a, b in pairs}
    digests |= {Namespace(**BASE, extra={a: b}).digest() for a, b in pairs}
    assert len(digests) == 2 * len(pairs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_bytes", 0),
        ("page_bytes", -4096),
        ("page_bytes", 1 << 32),
        ("page_tokens", 0),
        ("key_bytes", 15),
        ("key_bytes", 33),
    ],
)
def test_impossible_namespaces_are_refused_by_field_and_value(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {value}"):
        Namespace(**{**BASE, field: value})


def test_no_two_salts_encode_alike() -> None:
    values = [None, "", "X", "Y", "XY", "ab", "a", "b", "bc", "c", "\0", "é"]
    seen = {}
    for salt, lora, tenant in itertools.product(values, values, values[:5]):
        encoded = encode_salt(salt=salt, lora=lora, tenant=tenant)
        assert encoded not in seen, (seen[encoded], (salt, lora, tenant))
        seen[encoded] = (salt, lora, tenant)


def test_no_salt_is_a_prefix_of_another() -> None:
    encoded = [encode_salt(salt=s, lora=t) for s, t in itertools.product([None, "", "a"], repeat=2)]
    for a, b in itertools.permutations([e for e in encoded if e], 2):
        assert not b.startswith(a)


def test_page_keys_behave_like_a_sequence_of_bytes() -> None:
    keys = PageKeys(b"aabbcc", 2)
    assert list(keys) == [b"aa", b"bb", b"cc"] and len(keys) == 3 and keys[2] == b"cc"
    assert keys.part(1, 3) == b"bbcc"
    assert keys == PageKeys.from_list([b"aa", b"bb", b"cc"]) and hash(keys) == hash(keys)
    assert keys != PageKeys(b"aabbcc", 2, rooted=False) and keys != PageKeys(b"aabbcc", 3)
    for index in (3, -1):
        with pytest.raises(IndexError):
            keys[index]
    assert keys != b"aabbcc"


@pytest.mark.parametrize(("data", "width"), [(b"abc", 2), (b"", 0), (b"ab", -1)])
def test_torn_page_keys_are_refused(data: bytes, width: int) -> None:
    with pytest.raises(ValueError):
        PageKeys(data, width)


def test_from_hex_takes_the_page_hashes_of_sglang() -> None:
    keys = PageKeys.from_hex(["00" * 31 + "ff", "AB" * 32])
    assert keys.width == 32 and keys[1] == b"\xab" * 32
    assert len(PageKeys.from_hex([])) == 0


@pytest.mark.parametrize(
    "keys",
    [["abc", "def"], ["ab", "abcd"], ["zz"], ["ab cd ", "ab cd "], [""], ["٣٣"], [" ab ", "abcd"]],
)
def test_from_hex_refuses_what_is_not_whole_bytes_of_hexadecimal(keys: list[str]) -> None:
    with pytest.raises(ValueError):
        PageKeys.from_hex(keys)


def test_from_list_refuses_keys_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        PageKeys.from_list([b"a", b"bc"])
    assert len(PageKeys.from_list([])) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], ">u4"),
        np.array([1, 0, 2, 0, 3, 0], np.uint32)[::2],
        np.array([1, 2, 3], np.uint8),
    ],
)
def test_token_array_takes_any_integers(tokens: object) -> None:
    array = token_array(tokens)  # type: ignore[arg-type]
    assert array.dtype == np.dtype("=u4") and array.tolist() == [1, 2, 3]
    assert array.flags.c_contiguous


def test_token_array_does_not_copy_what_is_right_already() -> None:
    tokens = np.arange(5, dtype=np.uint32)
    assert token_array(tokens) is tokens
    assert token_array([]).size == 0
    assert token_array([0, 0xFFFFFFFF]).tolist() == [0, 0xFFFFFFFF]


@pytest.mark.parametrize(
    "tokens",
    [[-1], [1 << 32], [1.5], [True, False], [[1, 2]], ["a"], "abc", [1 << 70], [2**63, -1], 5.0],
)
def test_token_array_refuses_what_is_no_token(tokens: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        token_array(tokens)  # type: ignore[arg-type]
