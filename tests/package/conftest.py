"""The wheel, and environments to install it in."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.environments import Environment

ROOT = Path(__file__).parents[2]
collect_ignore = ["nvidia"]  # installed into environments, never imported here


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The path of the wheel that the repository builds."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def alone(wheel, tmp_path_factory):
    """An environment with apex-amp, without NVIDIA's apex."""
    environment = Environment(tmp_path_factory.mktemp("alone"))
    environment.pip("install", "--no-deps", str(wheel))
    return environment
