"""Real servers in other modes: host memory as a mere buffer; the direct route by its short name.

Two servers, each started twice.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deployment import FINE_LOGPROB, PROMPT_HIT, Deployment, assert_from_storage, make_prompt
from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import ensure_model
from sglang_cpu.server import stored_pages, wait_until


def test_host_memory_as_a_buffer(model: Path, backend: Backend, tmp_path: Path) -> None:
    """`buffer_only`: host memory keeps nothing, SGLang remembers itself what it stored before."""
    flags = ["--hicache-host-memory-mode=buffer_only"]
    with Deployment(model, backend, tmp_path / "server.log", flags=flags) as deployment:
        server = deployment.server
        prompt = make_prompt("buffer")
        cold = deployment.generate_and_settle(prompt)
        server.flush()
        assert_from_storage(server.generate(prompt), cold)
        # A longer prompt: the prefetch begins behind pages that are on the device.
        longer = [*prompt, *cold.output_ids, *make_prompt("buffer, next turn", 150)]
        first = server.generate(longer)
        deployment.await_pages(stored_pages([[*longer, *first.output_ids]], PAGE_TOKENS))
        server.flush()
        server.generate(prompt)
        reply = server.generate(longer)
        assert reply.same_output(first) and reply.logprob_difference(first) <= FINE_LOGPROB
        assert reply.cached.total == (len(longer) - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert reply.cached.storage > 0
        # What SGLang remembers must not outlive what it remembers.
        server.clear_storage()
        assert wait_until(lambda: backend.usage().pages == 0, 10)
        server.flush()
        again = deployment.generate_and_settle(prompt)
        assert again.cached.total == 0 and again.same_output(cold)
        server.detach()
        server.flush()
        assert server.generate(prompt).cached.total == 0
        assert server.attach(backend.name, backend.extra_config())[0] == 200
        server.flush()
        assert_from_storage(server.generate(prompt), cold)
        deployment.kill_and_restart()
        assert_from_storage(deployment.server.generate(prompt), cold)


def test_the_direct_route_by_its_short_name(
    model: Path, backend_name: str, store_folder: Path, tmp_path: Path
) -> None:
    if backend_name != "tutti":
        pytest.skip("tutti's own route")
    backend = Backend(backend_name, store_folder, route="linker")
    with Deployment(model, backend, tmp_path / "server.log") as deployment:
        server = deployment.server
        prompts = [make_prompt(f"direct {i}") for i in range(2)]
        cold = [deployment.generate_and_settle(prompt) for prompt in prompts]
        server.flush()
        assert_from_storage(server.generate(prompts[0]), cold[0], route="linker")
        assert server.generate(prompts[0]).cached.device == PROMPT_HIT

        # The endpoints are of the other route: refused, and nothing happens.
        status, message = server.attach("tutti", backend.extra_config())
        assert status == 400, message
        assert server.call("POST", "/hicache/storage-backend/clear", {})[0] in (200, 400)
        server.flush()
        assert_from_storage(server.generate(prompts[1]), cold[1], route="linker")

        deployment.kill_and_restart(serve=True)
        server = deployment.server
        assert_from_storage(server.generate(prompts[0]), cold[0], route="linker")

        # New weights: nothing of the old ones is answered any more.
        other = ensure_model(tmp_path / "other", seed=2)
        body = {"model_path": str(other), "flush_cache": True}
        server.call("POST", "/update_weights_from_disk", body, expect=200)
        reply = server.generate(prompts[1])
        assert reply.cached.total == 0
        assert reply.same_output(server.generate(prompts[1], namespace="from scratch"))
        assert "the weights changed while the server runs" in server.log()


@pytest.mark.parametrize("wrong", [{"capasity": "2GiB"}, {"capacity": "a lot"}, {"path": 7}])
def test_settings_of_the_direct_route(wrong: dict[str, object], model: Path) -> None:
    """A wrong option is told where the command line is read, before anything starts."""
    from tutti_core import ConfigError

    with pytest.raises(ConfigError, match=next(iter(wrong))):
        resolve(model, short_form({"path": "/nowhere", "capacity": "1GiB", **wrong}))


def test_short_and_long_form_are_the_same(model: Path) -> None:
    options = {"path": "/nowhere", "capacity": "1GiB"}
    long = {
        "linker": "TuttiLinker",
        "linker_module_path": "tutti_sglang.linker",
        "linker_extra_config": options,
    }
    short = resolve(model, short_form(options))
    assert short == resolve(
        model,
        [
            "--enable-unified-cache-external-linker",
            "--unified-cache-external-linker-backend=dynamic",
            f"--unified-cache-external-linker-config={json.dumps(long)}",
        ],
    )
    assert short == (True, "dynamic", long)
    assert resolve(model, []) == (False, "mooncake", None)


@pytest.mark.parametrize(
    "beside",
    [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend=tutti",
        "--disable-radix-cache",
        "--radix-cache-backend=other",
        "--enable-lmcache",
        "--enable-linker-mla-dedup",
    ],
)
def test_what_sglang_refuses_beside_a_linker_stays_refused(beside: str, model: Path) -> None:
    options = {"path": "/nowhere", "capacity": "1GiB"}
    flag = beside.split("=")[0]
    with pytest.raises(ValueError, match=f"{flag}|radix") as refused:
        resolve(model, [*short_form(options), beside])
    assert "linker" in str(refused.value).lower()


def short_form(options: dict[str, object]) -> list[str]:
    return [
        "--unified-cache-external-linker-backend=tutti",
        f"--unified-cache-external-linker-config={json.dumps(options)}",
    ]


def resolve(model: Path, flags: list[str]) -> tuple[bool, str, dict[str, object] | None]:
    """What SGLang makes of the flags that have to do with a linker."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang_cpu.server import BASE_FLAGS

    load_plugins()
    args = prepare_server_args([*BASE_FLAGS, f"--model-path={model}", *flags])
    args.resolve_once()
    view = resolving_view(args)
    return (
        view.enable_unified_cache_external_linker,
        view.unified_cache_external_linker_backend,
        view.unified_cache_external_linker_config,
    )
