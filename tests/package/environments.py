"""Virtual environments that see this one's torch, and wheels of the stand-in for NVIDIA's apex."""

import ast
import os
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

NVIDIA = Path(__file__).parent / "nvidia"


class Environment:
    """A virtual environment without pip: this one's pip installs into it."""

    def __init__(self, folder):
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        # A path line: the .pth files over there are not read, so its apex-amp is not found.
        (self.site / "zz_torch.pth").write_text(str(Path(find_spec("torch").origin).parents[1]))

    def pip(self, *arguments):
        line = ["-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "-q"]
        # This one's site-packages are on the path, too, with an apex-amp that is not meant.
        new = ["--ignore-installed"] if arguments[0] == "install" else []
        return outcome([sys.executable, *line, *arguments, *new])

    def unpack(self, wheel, folder=None):
        """Puts a wheel's files where pip would."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder or self.site)

    def run(self, *arguments, **environ):
        """Runs Python with these arguments; returns what it prints."""
        return outcome([str(self.python), *arguments], **environ)

    def value(self, code, *flags, **environ):
        """Runs code; returns the literal that it prints last."""
        return ast.literal_eval(self.run(*flags, "-c", code, **environ).splitlines()[-1])

    def files(self):
        """Returns all files and their bytes, but for what an import compiles."""
        found = (path for path in self.site.rglob("*") if "__pycache__" not in path.parts)
        return {str(p.relative_to(self.site)): p.read_bytes() for p in found if p.is_file()}


def outcome(command, **environ):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd="/", env={**kept, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nvidia_wheel(folder, *, amp=False):
    """Writes a wheel of the stand-in; with ``amp``, of an apex from before May 2025."""
    files = {str(p.relative_to(NVIDIA)): p.read_text() for p in NVIDIA.rglob("*.py")}
    if amp:
        files["apex/amp/__init__.py"] = 'WHOSE = "theirs"\n'
        del files["amp_C.py"]
    info = "apex-0.1.dist-info"
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / "apex-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path
