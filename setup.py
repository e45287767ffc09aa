"""Builds the extension with CMake: LLVM linked statically with hidden symbols, so that a wheel's user needs neither LLVM nor a compiler."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configures and builds in build-wheel/, then installs the extension beside the Python files."""

    def run(self) -> None:
        if os.environ.get("DEPLO_SKIP_BUILD"):
            return
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = ROOT / "build-wheel"
        given = os.environ.get("CMAKE_ARGS", "").split()
        options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython3_EXECUTABLE={sys.executable}", "-DDEPLO_TESTS=OFF", *given]
        try:
            subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, f"-DDEPLO_EXTENSION_DIR={folder}/deplo", *options], check=True)
            subprocess.run(["cmake", "--build", folder, "--target", "deplo_python", "deplo_runtime_shared"], check=True)
            subprocess.run(["cmake", "--install", folder, "--strip", "--prefix", target.parent.parent], check=True)
        except FileNotFoundError as error:
            raise SystemExit(f"deplo needs {error.filename} to build: run `make system`, or install cmake and ninja") from None


def torch_requirement() -> list[str]:
    try:
        import torch
    except ImportError:
        raise SystemExit("deplo builds against an installed torch: install it first, and pass --no-build-isolation to pip") from None
    return [f"torch=={torch.__version__.split('+')[0]}"]


setup(ext_modules=[Extension("deplo._C", [])], cmdclass={"build_ext": CMakeBuild}, install_requires=torch_requirement())
