"""Start-up hook: prepares the interpreter when `sglang` or `torchvision` is first imported.

Loaded by tutti_sglang_cpu.pth in every process of the environment, so it costs next to nothing and
changes nothing until then; a process that never imports sglang sees neither a mock triton nor a
changed environment. With a torch that isn't a `+cpu` build it does nothing at all.

Before sglang
1. SGLANG_USE_CPU_ENGINE=1, unless the caller set it: SGLang takes its CPU paths, here and in its
   child processes.
2. triton (1 GB, GPU only): if it isn't installed, mock modules let kernel definitions be read. No
   kernel ever runs: SGLang's CPU paths don't launch any.

Before torchvision (transformers imports it too)
3. The published wheel's C++ library doesn't load beside CPU torch, and its Python part then fails
   on two operators nobody declared. Their schemas are enough; nothing calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _torch_is_cpu_only() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "+cpu" in version("torch")
    except PackageNotFoundError:
        return False


class _Before:
    """Meta path entry that finds nothing; it calls `prepare` once, just before `module` loads."""

    def __init__(self, module: str, prepare: Callable[[], None]) -> None:
        self.module = module
        self.prepare = prepare

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.module:
            sys.meta_path.remove(self)
            if _torch_is_cpu_only():
                self.prepare()


def _before_sglang() -> None:
    import os

    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.append(_MockTriton())  # last: a real triton wins


def _before_torchvision() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[Any] = []  # operator schemas live only as long as their Library object


class _MockModule(ModuleType):
    """A module in which every name exists.

    Capitalised names are empty classes (they get subclassed and instantiated); all others are mock
    modules in turn. Calling one is a decorator that changes nothing: `@triton.jit` and
    `@triton.autotune(...)` both leave the function as it is. Iterating one yields nothing, so
    `"cpu" in triton.backends.backends` is False.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # dunder probes of inspect, copy, importlib must fail as usual
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = type(name, (), {"__init__": lambda self, *a, **k: None})
        else:
            from importlib import import_module

            made = import_module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __iter__(self) -> Any:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if bare else lambda function: function


class _MockTriton:
    """Finder and loader of `triton` and whatever is imported below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".", 1)[0] != "triton":
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MockModule(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "triton":
            module.__version__ = "3.0.0"  # compared with minimum versions
            module.cdiv = lambda x, y: -(-x // y)
            module.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()


sys.meta_path[:0] = [
    _Before("sglang", _before_sglang),
    _Before("torchvision", _before_torchvision),
]
