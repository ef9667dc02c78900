"""What a client without a key may do to the store over HTTP: what docs/security.md says."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROUTE = "/hicache/storage-backend"


def handlers() -> dict[tuple[str, str], ast.AsyncFunctionDef]:
    """Each endpoint of SGLang's server about the cache, by method and path."""
    spec = importlib.util.find_spec("sglang.srt.entrypoints.http_server")
    assert spec is not None and spec.origin is not None
    found = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            path = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if not isinstance(path, ast.Constant) or "cache" not in str(path.value):
                continue
            named = [k.value for k in call.keywords if k.arg == "methods"]
            verb = getattr(call.func, "attr", "").upper()
            methods = [e.value for e in named[0].elts] if named else [verb]  # type: ignore[attr-defined]
            found.update({(method, str(path.value)): node for method in methods})
    return found


def level_of(node: ast.AsyncFunctionDef) -> str:
    """The name of the level of rights that an endpoint asks for."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "auth_level":
            return call.args[0].attr  # type: ignore[attr-defined,no-any-return]
    return "NORMAL"


def test_the_endpoints_about_the_cache_are_those_that_are_written_about() -> None:
    levels = {key: level_of(node) for key, node in handlers().items()}
    assert levels == {
        ("GET", "/flush_cache"): "ADMIN_OPTIONAL",
        ("POST", "/flush_cache"): "ADMIN_OPTIONAL",
        ("POST", f"{ROUTE}/clear"): "ADMIN_OPTIONAL",
        ("PUT", ROUTE): "ADMIN_OPTIONAL",
        ("DELETE", ROUTE): "ADMIN_OPTIONAL",
        ("GET", ROUTE): "ADMIN_OPTIONAL",
        ("GET", "/get_hicache_l3_cache_layout"): "NORMAL",
    }


@pytest.mark.parametrize("method", ["PUT", "DELETE", "GET"])
def test_attaching_is_refused_until_there_is_an_admin_key(method: str) -> None:
    source = ast.unparse(handlers()[method, ROUTE])
    assert "if not get_serving().admin_api_key:" in source
    assert "_admin_api_key_missing_response()" in source


@pytest.mark.parametrize(
    ("keys", "sent", "may"),
    [
        ((None, None), None, True),
        (("user", None), None, False),
        (("user", None), "user", True),
        ((None, "admin"), None, False),
        (("user", "admin"), "user", False),
        (("user", "admin"), "admin", True),
    ],
)
def test_who_may_clear(keys: tuple[str | None, str | None], sent: str | None, may: bool) -> None:
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    decision = decide_request_auth(
        method="POST",
        path=f"{ROUTE}/clear",
        authorization_header=f"Bearer {sent}" if sent else None,
        api_key=keys[0],
        admin_api_key=keys[1],
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    assert decision.allowed == may
