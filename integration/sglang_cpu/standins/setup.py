"""Adds the start-up hook (a .pth file) to the wheel; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = "tutti_sglang_cpu.pth"


class BuildWithStartupHook(build_py):
    """setuptools has no setting for a file at the top of site-packages, so it is copied here."""

    def run(self) -> None:
        super().run()
        self.copy_file(HOOK, str(Path(self.build_lib) / HOOK))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / HOOK)]


setup(cmdclass={"build_py": BuildWithStartupHook})
