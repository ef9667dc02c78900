"""A pytest plugin: uses another build of the extension, which TUTTI_NATIVE names."""

from __future__ import annotations

import importlib.util
import os
import sys

_NAME = "tutti_core._native"
_spec = importlib.util.spec_from_file_location(_NAME, os.environ["TUTTI_NATIVE"])
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_NAME] = _module
_spec.loader.exec_module(_module)


def pytest_report_header() -> str:
    """Say which build is tested."""
    return f"extension: {_module.__file__}"
