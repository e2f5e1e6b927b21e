"""Adds one step to the build that pyproject.toml describes: generating the protobuf modules."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# The generator lives beside the protos.
sys.path.insert(0, str(Path(__file__).resolve().parent / "proto"))

from generate import generate


class BuildWithProtos(build_py):
    """The ordinary build, after the protobuf modules have been written into the source tree."""

    def run(self) -> None:
        generate()
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
