"""Who may have a hand in a store: paths and files of others, and pages of other tenants."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from store_kit import (
    PAGE,
    client,
    memory_devices,
    open_small,
    poll,
    run,
    small_config,
    snapshot,
)
from tier_kit import DRAM, open_tiers, tiered_config

import tutti_core.store as store_module
from tutti_core import BusyError, ConfigError, DeviceError, Namespace, PrefixStore
from tutti_core.describe import describe_store
from tutti_core.keys import encode_salt
from tutti_core.repair import repair_store
from tutti_core.tiers import pools, trust
from tutti_core.tiers.lease import take_lease
from tutti_core.tiers.pools import discard_store, store_lock
from tutti_core.trials import unsafe_paths
from tutti_core.trials.kit import quiesce
from tutti_core.verify import verify_store

USER, OTHER = 54321, 54322
"""Ids of users that no system has."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root")
"""Only root can be other users in turn; the reason is one that a strict run allows."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp: everybody may write, entries belong to who made them."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tutti-shared-", dir=base))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_user(user: int, work: Callable[[], object]) -> Any:
    """What `work` returns in a child process of another user; its exception is raised here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            answer: tuple[Any, Any] = (work(), None)
        except BaseException as error:
            answer = (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    result, failed = pickle.loads(data)
    if failed:
        raise AssertionError(failed)
    return result


def opened(path: Path, **changes: Any) -> str:
    """What opening, saving and loading end in: "" or the error."""
    try:
        with open_small(path, **changes) as store:
            pages = client(store)
            assert all(pages.save(run("k", 3))) and all(pages.load(run("k", 3)))
    except ConfigError as error:
        return str(error)
    return ""


def modes_below(path: Path) -> dict[str, int]:
    """Modes of a directory and of everything in it."""
    every = [path, *path.rglob("*")]
    return {str(p.relative_to(path)): stat.S_IMODE(p.lstat().st_mode) for p in every}


# ---- everything that is unsafe, and that it is noticed ----
def test_unsafe_paths_are_refused_with_a_remedy(fast_path: Path) -> None:
    tally = unsafe_paths.run(fast_path, seed=0)
    tally.check()
    kinds = ["writable by others", "symbolic link", "hard link", "FIFO", "socket"]
    kinds += ["directory for a file", "file for a directory"]
    if os.geteuid() == 0:
        kinds.append("foreign owner")
    assert set(tally.bad_inputs) == {f"path: {kind}" for kind in kinds}
    assert all(count >= 3 for count in tally.bad_inputs.values())
    assert tally.pages_compared >= 4 * sum(tally.bad_inputs.values())


@pytest.mark.parametrize("part", ["files", "directories", "passage", "links"])
def test_the_trial_notices_what_is_not_looked_at(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Negative control: each of the looks is taken out in turn."""
    nothing = lambda *arguments, **named: None  # noqa: E731
    monkeypatch.setattr(unsafe_paths, "OPEN_TIMEOUT_S", 1.0)
    if part == "files":
        monkeypatch.setattr(trust, "check_status", nothing)
    elif part == "directories":
        monkeypatch.setattr(trust._Walk, "_check_end", nothing)
    elif part == "passage":
        monkeypatch.setattr(trust._Walk, "_check_passage", nothing)
    else:
        real = trust._Walk._follow

        def follow(self: Any, link: Any, directory: Any, at: Path, target: str) -> None:
            self._trusting, self._last_may_link = True, True
            real(self, link, directory, at, target)

        monkeypatch.setattr(trust._Walk, "_follow", follow)
    tally = unsafe_paths.run(fast_path, seed=0)
    assert tally.complaint_count >= 2, "it would not notice"
    with pytest.raises(AssertionError):
        tally.check()


def test_a_trial_that_goes_on_tries_two_at_once(fast_path: Path) -> None:
    tally = unsafe_paths.run(fast_path, seed=3, seconds=2.0)
    tally.check()
    assert tally.bad_inputs["path: two at once"] > 0


@pytest.mark.parametrize("tool", [describe_store, verify_store, repair_store])
def test_tools_look_as_closely_as_the_store(store_dir: Path, tool: Any) -> None:
    open_small(store_dir).close()
    (store_dir / "catalog" / "data.mdb").chmod(0o666)
    before = snapshot(store_dir)
    with pytest.raises(ConfigError, match=r"`chmod go-w .*data\.mdb`"):
        tool(store_dir)
    assert snapshot(store_dir) == before
    tool(store_dir, trust_path=True)


def test_a_store_is_not_discarded_through_a_link(store_dir: Path) -> None:
    open_small(store_dir).close()
    pool = store_dir / "pool.tutti"
    precious = store_dir.parent / "precious"
    pool.rename(precious)
    pool.symlink_to(precious)
    before = snapshot(store_dir.parent)
    with pytest.raises(ConfigError, match="symbolic link"):
        discard_store(small_config(store_dir))
    assert snapshot(store_dir.parent) == before


# ---- modes ----
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(store_dir: Path, umask: int) -> None:
    """Everything that is made, directories above the store included, is the owner's alone."""
    path, place = store_dir / "deep" / "store", store_dir / "other" / "place"
    before = os.umask(umask)
    try:
        assert opened(path) == ""
        assert opened(store_dir / "second", pools=[place]) == ""
    finally:
        os.umask(before)
    for name, mode in modes_below(store_dir).items():
        assert mode == (0o700 if (store_dir / name).is_dir() else 0o600), f"{name}: {mode:o}"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_repair_leaves_the_modes_that_it_found(store_dir: Path, umask: int) -> None:
    """Also where it makes the catalog anew."""
    assert opened(store_dir) == ""
    with open(store_dir / "catalog" / "data.mdb", "r+b") as stream:
        stream.seek(2 * 4096)
        stream.write(b"\xff" * 4096 * 4)
    before = os.umask(umask)
    try:
        assert repair_store(store_dir).rebuilt
    finally:
        os.umask(before)
    for name, mode in modes_below(store_dir).items():
        assert mode == (0o700 if (store_dir / name).is_dir() else 0o600), f"{name}: {mode:o}"
    assert opened(store_dir) == ""


def test_modes_that_the_umask_spoils_are_noticed(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    before = os.umask(0o777)
    try:
        open_small(store_dir).close()
    finally:
        os.umask(before)
    assert 0o600 not in [modes_below(store_dir)[name] for name in ("lock", "pool.tutti")]


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_user_without_privileges_can_do_with_any_umask(shared: Path, umask: int) -> None:
    def work() -> tuple[str, str, dict[str, int]]:
        os.umask(umask)
        path = shared / "a" / "store"
        return opened(path), opened(path), modes_below(shared / "a")

    first, again, modes = as_user(USER, work)
    assert (first, again) == ("", "")
    assert set(modes.values()) == {0o700, 0o600}


# ---- users ----
@needs_root
def test_another_user_cannot_prepare_a_store_for_us(shared: Path) -> None:
    """Whoever comes first in /tmp would own the pages that a server writes there."""

    def work() -> dict[str, str]:
        return {name: opened(shared / name) for name in ("store", "above/store", "link/store")}

    (shared / "theirs").mkdir()
    (shared / "store").mkdir()
    (shared / "above").mkdir()
    (shared / "link").symlink_to(shared / "theirs")
    for name in ("theirs", "store", "above", "link"):
        os.chown(shared / name, OTHER, OTHER, follow_symlinks=False)
        if name != "link":
            (shared / name).chmod(0o777)
    said = as_user(USER, work)
    assert f"belongs to user {OTHER}, and this is user {USER}" in said["store"]
    assert f"`chown {USER} {shared / 'store'}`" in said["store"]
    assert f"belongs to user {OTHER}" in said["above/store"]
    assert "symbolic link in a directory that others may write" in said["link/store"]
    assert [list((shared / n).iterdir()) for n in ("theirs", "store", "above")] == [[], [], []]


@needs_root
def test_a_link_of_root_is_followed(shared: Path) -> None:
    """/data -> /mnt/nvme0, as an administrator makes them; not if it is a third user's."""
    root, disk = shared / "root", shared / "root" / "disk"
    root.mkdir()
    disk.mkdir()
    os.chown(disk, USER, USER)
    (root / "data").symlink_to(disk)
    (root / "odd").symlink_to("../root/./data")  # relative, and a link to a link

    def work() -> list[str]:
        return [opened(root / name / "store") for name in ("data", "odd")]

    assert as_user(USER, work) == ["", ""]
    os.chown(root / "data", OTHER, OTHER, follow_symlinks=False)
    said = as_user(USER, work)
    assert all(f"{root / 'data'} belongs to user {OTHER}" in line for line in said)


@needs_root
def test_what_root_owns_is_as_good_as_our_own(shared: Path) -> None:
    """Only root could exchange it, and root can do everything anyway."""
    path = shared / "store"
    as_user(USER, lambda: opened(path))
    for name in ("lock", "catalog/lock.mdb"):
        os.chown(path / name, 0, USER)
        (path / name).chmod(0o640)
    said = as_user(USER, lambda: _seen(path))
    assert said == "", "it is not for us to say that root must not"


def _seen(path: Path) -> str:
    try:
        pools.check_catalog(path)
    except ConfigError as error:
        return str(error)
    return ""


@needs_root
def test_a_directory_whose_owner_may_write_only_by_his_own_group_is_his(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each user has a group of his own, the umask is 002 and home directories say 0775."""
    import grp
    import pwd

    (shared / "home").mkdir()
    os.chown(shared / "home", USER, USER)
    (shared / "home").chmod(0o775)

    def work(name: str = "u", group: str = "u", members: tuple[str, ...] = ()) -> Any:
        user = pwd.struct_passwd((name, "x", USER, USER, "", "/", "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
        entry = grp.struct_group((group, "x", USER, list(members)))
        monkeypatch.setattr(grp, "getgrgid", lambda gid: entry)
        return opened(shared / "home" / "store")

    assert as_user(USER, work) == ""
    assert "`chmod g-w" in as_user(USER, lambda: work(group="users"))
    assert "`chmod g-w" in as_user(USER, lambda: work(members=("u", "v")))
    assert "`chmod g-w" in as_user(USER, lambda: opened(shared / "home" / "store")), "no such user"


@needs_root
def test_root_of_a_user_namespace_need_not_be_the_owner_of_the_root_directory(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There everything of the real root's appears as nobody's, and so does all of strangers."""
    nobody, real = 65534, os.fstat

    def mapped(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if status.st_uid == 0:
            values = list(status)
            values[4] = nobody
            return os.stat_result(values)
        return status

    def work(name: str) -> str:
        monkeypatch.setattr(trust.os, "fstat", mapped)
        return opened(shared / name / "store")

    os.chown(shared, USER, USER)
    shared.joinpath("mine").mkdir()
    os.chown(shared / "mine", USER, USER)
    shared.joinpath("nobody's").mkdir()
    assert as_user(USER, lambda: work("mine")) == ""
    assert f"belongs to user {nobody}" in as_user(USER, lambda: work("nobody's"))


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777, 0o2775])
def test_volumes_that_a_platform_hands_over_can_be_trusted(shared: Path, mode: int) -> None:
    """A container's root with a volume of another user; emptyDir and fsGroup of Kubernetes."""
    volume = shared / "volume"
    volume.mkdir()
    os.chown(volume, USER, USER)
    volume.chmod(mode)
    for path in (volume, volume / "store"):
        said = opened(path)
        assert f"{volume} belongs to user {USER}" in said and "trust_path" in said
        assert opened(path, trust_path=True) == ""
        assert opened(path, trust_path=True) == "", "and again"
        for file in path.rglob("*"):  # what fsGroup does at each start
            file.chmod(file.stat().st_mode | 0o060)
        assert opened(path, trust_path=True) == ""
        shutil.rmtree(path / "catalog")
        (path / "pool.tutti").unlink()
    (shared / "precious").write_bytes(b"x")
    (volume / "lock").unlink()
    (volume / "lock").symlink_to(shared / "precious")
    assert "symbolic link" in opened(volume, trust_path=True), "that is not waived"


# ---- between the look and the use ----
@pytest.mark.parametrize("put", ["link", "foreign", "fifo", "twice"])
def test_what_is_exchanged_after_the_look_is_judged_once_it_is_open(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """The file that counts is the one that was opened, not the one that had the name before."""
    open_small(store_dir).close()
    pool, precious = store_dir / "pool.tutti", store_dir.parent / "precious"
    shutil.copy(pool, precious)
    if put == "foreign" and os.geteuid() != 0:
        put = "twice"

    def exchange(path: Path, *, trusting: bool = False) -> bool:
        if path == pool and not done:
            done.append(1)
            pool.unlink()
            if put == "link":
                pool.symlink_to(precious)
            elif put == "foreign":
                shutil.copy(precious, pool)
                os.chown(pool, OTHER, OTHER)
            elif put == "fifo":
                os.mkfifo(pool)
            else:
                os.link(precious, pool)
        return True

    done: list[int] = []
    monkeypatch.setattr(trust, "check_file", exchange)
    before = precious.read_bytes()
    with pytest.raises(ConfigError, match=r"pool\.tutti"):
        open_small(store_dir)
    assert done and precious.read_bytes() == before


def test_a_draft_that_was_put_there_is_not_written_to(store_dir: Path) -> None:
    """A second name of a file in the place where the pool is made: it would be cut to nothing."""
    store_dir.mkdir(mode=0o700)
    precious = store_dir.parent / "precious"
    precious.write_bytes(b"precious" * 1000)
    for put in (os.link, os.symlink):
        put(precious, store_dir / "pool.tutti.new")
        assert opened(store_dir) == ""
        assert precious.read_bytes() == b"precious" * 1000 and precious.stat().st_nlink == 1
        discard_store(small_config(store_dir))


def test_what_is_put_in_the_place_of_a_lease_later_is_left_alone(store_dir: Path) -> None:
    open_small(store_dir).close()
    os.mkfifo(store_dir / "leases" / "7.lock")
    (store_dir / "leases" / "0.lock").unlink()
    (store_dir / "leases" / "0.lock").symlink_to(store_dir / "lock")
    with pytest.raises(DeviceError, match="symbolic link"):
        take_lease(store_dir / "leases")


@pytest.mark.parametrize("where", ["path", "pools"])
@pytest.mark.parametrize("name", ["a\0b", "n" * 256, "/".join(["d"] * 3000), "loop/store"])
def test_paths_that_no_system_call_takes(store_dir: Path, where: str, name: str) -> None:
    store_dir.mkdir(mode=0o700)
    (store_dir / "loop").symlink_to("loop")
    place = store_dir / name
    path, places = (place, []) if where == "path" else (store_dir / "s", [place])
    assert re.search(r"path = |cannot be (read|the name)", opened(path, pools=places))
    assert os.listdir(store_dir) == ["loop"]


@needs_root
def test_a_path_through_a_directory_that_is_closed_to_us(shared: Path) -> None:
    (shared / "closed").mkdir(mode=0o700)
    said = as_user(USER, lambda: [opened(shared / "closed" / n) for n in ("s", "deep/s")])
    assert all("path = " in line and "denied" in line for line in said)
    (shared / "closed").chmod(0o711)  # may be passed, and not be listed
    (shared / "closed" / "mine").mkdir(mode=0o700)
    os.chown(shared / "closed" / "mine", USER, USER)
    assert as_user(USER, lambda: opened(shared / "closed" / "mine" / "store")) == ""


@pytest.mark.parametrize("name", ["notes", "007", "-1", "1 ", "\u0663", "99999999999999999999"])
def test_a_file_that_is_no_lease_is_none(store_dir: Path, name: str) -> None:
    """Somebody leaves a file of that kind behind; it stops nothing and gets no company."""
    open_small(store_dir).close()
    (store_dir / "leases" / f"{name}.lock").touch(0o600)
    before = sorted(os.listdir(store_dir / "leases"))
    assert opened(store_dir) == "" and verify_store(store_dir).clean
    assert describe_store(store_dir)[0].leases == []
    assert sorted(os.listdir(store_dir / "leases")) == before


# ---- waiting for another process ----
def test_a_lock_that_is_never_given_up_ends_in_an_error(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair may take hours, and a process that hangs for ever: an open must not."""
    open_small(store_dir).close()
    monkeypatch.setattr(pools, "LOCK_TIMEOUT_S", 0.2)
    with store_lock(store_dir):
        with pytest.raises(BusyError, match=r"for 0\.2 s; wait until it is done"):
            open_small(store_dir)
    assert opened(store_dir) == ""


def test_a_lock_that_is_given_up_is_waited_for(store_dir: Path) -> None:
    open_small(store_dir).close()
    said: list[str] = []
    with store_lock(store_dir):
        other = threading.Thread(target=lambda: said.append(opened(store_dir)))
        other.start()
        other.join(0.2)
        assert not said
    other.join(20)
    assert said == [""]


def test_a_change_of_the_working_directory_changes_nothing(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means what it meant when the store was opened."""
    store_dir.mkdir(mode=0o700)
    monkeypatch.chdir(store_dir)
    with open_small(Path("here"), pools=[Path("pages")], segments=4) as store:
        pages = client(store)
        assert all(pages.save(run("a", 3)))
        monkeypatch.chdir("/")
        assert all(pages.save(run("b", 25))) and all(pages.load(run("b", 25)))
        assert sorted(p.name for p in store_dir.iterdir()) == ["here", "pages"]


# ---- namespaces ----
_ALIKE = [
    *[
        "",
        "/",
        "a",
        "b",
        "ab",
        ":",
        ",",
        '"',
        "\\",
        "\0",
        "null",
        "None",
        "0",
        "{}",
        '","weights":"',
    ],
    *["\u00e9", "e\u0301", "\ufb01", "fi", "\u00c5", "A\u030a", "\u212b", "K", "\u212a"],
    *[" ", "\u00a0", "\ufeff"],
]
"""Separators, and texts that some normalisation makes equal."""

_texts = st.one_of(st.text(max_size=6), st.sampled_from(_ALIKE))
_draw: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(["model", "weights", "dtype", "layout", "shard", "pool"], _texts),
    "page_bytes": st.sampled_from([1, 2, 8, 16, 4096, 65536]),
    "page_tokens": st.sampled_from([1, 2, 16, 64]),
    "key_bytes": st.sampled_from([16, 17, 32]),
    "extra": st.dictionaries(_texts, _texts, max_size=3),
    "split": st.sampled_from([(), (1,), (1, 1)]),
}
_fields = st.fixed_dictionaries(_draw)
_salts = st.fixed_dictionaries({n: st.none() | _texts for n in ("salt", "lora", "tenant")})


def _namespace(fields: dict[str, Any]) -> Namespace:
    """A namespace of drawn fields; `split` says into which parts its pages are cut."""
    fields = dict(fields)
    split, size = fields.pop("split"), fields["page_bytes"]
    if split and size > len(split):
        fields["parts"] = (*split[1:], size - len(split) + 1)
    return Namespace(**fields)


@settings(max_examples=200, deadline=None)
@given(_fields, _fields, st.sets(st.sampled_from(sorted(_draw)), max_size=2))
@example(
    {**dict.fromkeys(["model", "weights", "dtype", "layout", "shard", "pool"], "é"),
     "page_bytes": 16, "page_tokens": 1, "key_bytes": 16, "extra": {}, "split": ()},
    {**dict.fromkeys(["model", "weights", "dtype", "layout", "shard", "pool"], "e\u0301"),
     "page_bytes": 16, "page_tokens": 1, "key_bytes": 16, "extra": {"": ""}, "split": (1,)},
    {"model"},
)  # fmt: skip
def test_namespaces_share_only_if_every_field_is_equal(one: Any, other: Any, take: Any) -> None:
    """Any two that differ in any field, looking alike or not, have different names."""
    two = {**one, **{name: other[name] for name in take}}
    a, b = _namespace(one), _namespace(two)
    assert (a.canonical() == b.canonical()) == (a == b)
    assert (a.digest() == b.digest()) == (a == b)


@settings(max_examples=100, deadline=None)
@given(_salts, _salts)
@example({"salt": "\u00e9"}, {"salt": "e\u0301"})
@example({"salt": "", "lora": None, "tenant": None}, {"salt": None, "lora": None, "tenant": None})
@example({"salt": "a\0", "lora": "b", "tenant": None}, {"salt": "a", "lora": "\0b", "tenant": None})
def test_salts_are_one_only_if_every_part_is_equal(a: Any, b: Any) -> None:
    """And none is the beginning of another, so that none runs into the tokens behind it."""
    one, two = encode_salt(**a), encode_salt(**b)
    assert (one == two) == (a == b)
    if one != two and one and two:
        assert not one.startswith(two) and not two.startswith(one)


def test_what_is_normalised_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a namespace that takes equal-looking names for equal."""
    real = Namespace.describe
    monkeypatch.setattr(
        Namespace,
        "describe",
        lambda self: {**real(self), "model": unicodedata.normalize("NFC", self.model)},
    )
    with pytest.raises(AssertionError):
        test_namespaces_share_only_if_every_field_is_equal()


_asked = [
    {},
    {"salt": ""},
    {"salt": "a"},
    {"lora": "a"},
    {"tenant": "a"},
    {"salt": "a", "lora": ""},
]
_spaces = [
    {},
    {"model": "org/M"},
    {"weights": "2"},
    {"shard": "tp 1/2"},
    {"pool": "draft"},
    {"extra": {"tenant": "b"}},
    {"extra": {"tenant": ""}},
    {"parts": (PAGE // 2, PAGE // 2)},
]


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(range(8)), st.sampled_from(range(6)), st.booleans()),
                min_size=4, max_size=12))  # fmt: skip
def test_a_store_gives_each_only_what_it_saved_itself(steps: list[tuple[int, int, bool]]) -> None:
    """The same tokens for all of them, in one store with memory above the drives."""
    tokens = list(range(48))
    with tempfile.TemporaryDirectory() as folder:
        config = tiered_config(Path(folder) / "s", segments=32, dram=16 * DRAM)
        with open_tiers(config, memory_devices(config)) as store:
            made = [
                store.namespace(
                    **{"model": "org/m", "page_bytes": PAGE, "page_tokens": 16, **fields}
                )
                for fields in _spaces
            ]
            saved: dict[tuple[int, int], bytes] = {}
            for number, (space, who, clears) in enumerate(steps):
                last = number + 1 == len(steps)
                if clears:
                    here = [key for key in saved if key[0] == space]
                    assert made[space].clear() == 3 * len(here)
                    for key in here:
                        del saved[key]
                else:
                    keys = made[space].keys(tokens, **_asked[who])
                    data = bytes([number + 1]) * 3 * PAGE
                    if (space, who) not in saved:
                        assert made[space].save(keys, data).wait(20).all()
                        saved[space, who] = data
                for at, pages in enumerate(made) if clears or last else ():
                    for asked, fields in enumerate(_asked):
                        keys = pages.keys(tokens, **fields)
                        found = pages.match(keys).pages
                        assert found == 3 * ((at, asked) in saved), (at, asked)
                        if found and not pages.namespace.parts:
                            memory = bytearray(3 * PAGE)
                            assert pages.load(keys, memory).wait(20).all()
                            assert memory == saved[at, asked]


def test_a_salt_that_is_lost_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: two tenants, and a store that takes them for one."""
    two_tenants = test_a_store_gives_each_only_what_it_saved_itself.hypothesis.inner_test
    two_tenants([(0, 2, False), (0, 3, False)])
    monkeypatch.setattr(store_module, "encode_salt", lambda **parts: b"")
    with pytest.raises(AssertionError):
        two_tenants([(0, 2, False), (0, 3, False)])


# ---- clear ----
SHARDS = [{"shard": "tp 0/2"}, {"shard": "tp 1/2"}, {"pool": "draft"}, {"extra": {"tenant": "b"}}]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
def test_clear_leaves_the_others_in_every_tier(store_dir: Path, policy: str, mode: str) -> None:
    config = tiered_config(
        store_dir, segments=16, dram=8 * DRAM, write_policy=policy, dram_mode=mode
    )
    devices = memory_devices(config)
    with open_tiers(config, devices) as store:
        clients = [client(store, **fields) for fields in SHARDS]
        for pages in clients:
            assert all(pages.save(run("k", 8)))
        quiesce(store)
        for pages in clients:
            pages.load(run("k", 8))
        quiesce(store)
        assert clients[1].pages.clear() == 8
        for pages in clients:
            cleared = pages is clients[1]
            assert pages.match(run("k", 8)) == (0 if cleared else 8)
            assert pages.load(run("k", 8)) == [not cleared] * 8
        assert clients[1].pages.clear() == 0
        assert store.flush(20)
    with open_tiers(config, devices.reopen()) as store:
        found = [client(store, **fields).match(run("k", 8)) for fields in SHARDS]
        assert found == [8, 0, 8, 8]


def test_a_clear_that_takes_too_much_would_be_noticed(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: shards that are one namespace."""
    real = Namespace.describe
    monkeypatch.setattr(Namespace, "describe", lambda self: {**real(self), "shard": ""})
    with pytest.raises(AssertionError):
        test_clear_leaves_the_others_in_every_tier(store_dir, "write_through", "inclusive")


CLEARING = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_kit import client, open_small, run
with open_small(Path(sys.argv[2]), segments=8, writers_max=2) as store:
    theirs, same = client(store, shard="tp 1/2"), client(store, shard="tp 0/2")
    assert all(theirs.save(run("theirs", 4)))
    print(theirs.match(run("ours", 4)), same.match(run("ours", 4)), flush=True)
    sys.stdin.readline()
    print(theirs.pages.clear(), flush=True)
    sys.stdin.readline()
    print(all(same.load(run("ours", 4))), same.pages.clear(), flush=True)
"""


def test_clear_in_another_process_leaves_what_is_not_its_namespace(store_dir: Path) -> None:
    with open_small(store_dir, segments=8, writers_max=2) as store:
        ours = [client(store, shard="tp 0/2"), client(store, model="org/other")]
        for pages in ours:
            assert all(pages.save(run("ours", 4)))
        other = subprocess.Popen(
            [sys.executable, "-c", CLEARING, str(Path(__file__).parents[1]), str(store_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdin is not None and other.stdout is not None

        def next_line() -> str:
            other.stdin.write("\n")
            other.stdin.flush()
            return other.stdout.readline().strip()

        assert other.stdout.readline().strip() == "0 4"
        assert client(store, shard="tp 1/2").match(run("theirs", 4)) == 4
        assert next_line() == "4", "its own pages only"
        for pages in ours:
            assert pages.match(run("ours", 4)) == 4 and all(pages.load(run("ours", 4)))
        assert next_line() == "True 4", "the namespace is the same, whoever saved it"
        assert other.wait(20) == 0
        assert ours[1].match(run("ours", 4)) == 4 and all(ours[1].load(run("ours", 4)))
        assert store.stats().pages == 4
        poll(lambda: ours[0].pages.clear() == 0, "nothing is left of it")


def test_the_secret_of_a_store_makes_its_keys_its_own(fast_path: Path) -> None:
    """Page keys of one store say nothing about those of another."""
    made = []
    for name in "ab":
        with PrefixStore.open(small_config(fast_path / name)) as store:
            pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=16)
            made.append(set(pages.keys(list(range(64)))))
    assert not made[0] & made[1]
