"""What the README shows is true: its example runs, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutti_core import StoreConfig
from tutti_sglang.options import OWN_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_standalone_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = code.replace("/mnt/nvme/tutti", str(tmp_path / "store")).replace("100GiB", "1GiB")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["stored"].all() and names["loaded"].all()  # type: ignore[attr-defined]


def test_every_option_stands_in_the_table_and_no_other() -> None:
    table = README.split("| option | default | meaning |")[1].split("\n\n")[0]
    named = set(
        re.findall(
            r"`(\w+)`", "".join(row.split("|")[1] for row in table.split("\n") if "|" in row)
        )
    )
    assert named == {*StoreConfig.model_fields, *OWN_OPTIONS}


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
