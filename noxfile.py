"""The checks that `make` and CI run: lint, types and docs here, tests on an installed wheel."""

import logging
import shutil
import sys
import sysconfig
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "wheel", "tests"]

CONSTRAINTS = "packaging/constraints.txt"
DIST = Path("dist")
CLIENTS = ["tests/clients", "tests/package"]

# Checks of the sources share the environment that runs nox (`make` fills .venv with the extra
# `dev`): one torch instead of one per session.
shared = nox.session(venv_backend="none")


@shared
def lint(session):
    """Formatting, ruff rules, import directions."""
    session.run(sys.executable, "-m", "ruff", "format", "--check", ".")
    session.run(sys.executable, "-m", "ruff", "check", ".")
    session.run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


@shared
def types(session):
    """mypy --strict on src."""
    session.run(sys.executable, "-m", "mypy")


@shared
def docs(session):
    """The documentation; a warning or an unresolved reference is an error."""
    session.run(
        sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html",
        "docs", "docs/_build/html",
    )  # fmt: skip


@shared
def wheel(session):
    """Build the wheel, py3-none-any, and the sdist into dist/; check their metadata."""
    wheel_path = build_wheel(session)
    session.run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST))
    (sdist,) = DIST.glob("apex_amp-*.tar.gz")
    session.run(sys.executable, "-m", "twine", "check", "--strict", str(wheel_path), str(sdist))


@nox.session(venv_params=["--without-pip"])
def tests(session):
    """Every test and doctest, on the wheel as pip installs it; src/ is not importable here.

    torch, pip and the rest are found in the environment that runs nox, by a path line. Python reads
    no .pth file over there, so this one has no editable apex-amp; the one that it needs is copied.
    """
    wheel_path = build_wheel(session)
    (site,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    shared = Path(sysconfig.get_path("purelib"))
    (site / "00_dependencies.pth").write_text(f"{shared}\n")  # the first that Python reads
    for line in shared.glob("distutils-precedence.pth"):  # of setuptools
        shutil.copy(line, site)
    session.run(
        "python", "-m", "pip", "install", "-qq", "--no-deps", "--force-reinstall", str(wheel_path)
    )
    # CI reads the last line of the output as pytest's closing line: nox says nothing after it.
    logging.getLogger("nox").setLevel(logging.CRITICAL)
    session.run(
        "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not clients",
        *(session.posargs or ["tests", "README.md", "docs", "--pyargs", "apex"]),
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@shared
def stress(session):
    """The same tests with STRESS=1, which widens their lists."""
    sweep = "tests/casts/test_sweep.py"  # torch's database of operators changes its process
    env = {"OMP_NUM_THREADS": "1", "STRESS": "1"}
    session.run(
        sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile",
        *(session.posargs or ["tests", f"--ignore={sweep}"]), env=env,
    )  # fmt: skip
    if not session.posargs:
        session.run(sys.executable, "-m", "pytest", sweep, env=env)


@nox.session
@nox.parametrize("transformers", ["==4.57.*", "==5.5.*", ">=5.6"], ids=["4.57", "5.5", "newest"])
def clients(session, transformers):
    """Other libraries on this apex: the last Trainer that knew it, T5 on our norm, and today's."""
    lightning = ["lightning", "pytorch-lightning"] if transformers == ">=5.6" else []
    wheel_path = build_wheel(session)
    session.install("-qq", "-r", CONSTRAINTS)
    session.install(
        "-qq", "-c", CONSTRAINTS, f"{wheel_path}[test]",
        f"transformers{transformers}", "accelerate", "timm", *lightning,
    )  # fmt: skip
    session.install("-qq", "--no-deps", "torchao", "bitsandbytes")  # needs are met
    # Some pin another torch.
    optimizers = ["pytorch_optimizer", "torch_optimizer", "pytorch_ranger", "torch-optimi"]
    session.install("-qq", "--no-deps", *optimizers, "heavyball", "schedulefree")
    session.install("-qq", "cloudpickle", "onnx", "onnxruntime", "onnxscript", "tabulate")
    session.install("-qq", "--no-deps", "ema-pytorch", "higher", "peft", "skorch")
    session.install("-qq", "--no-deps", "--force-reinstall", str(wheel_path))
    session.run(
        "python", "-m", "pytest", "-m", "clients or slow",
        *(session.posargs or CLIENTS),
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@nox.session
def programs(session):
    """Programs of 2020 to 2025 that call apex, unmodified: docs/programs.md tells which and how."""
    wheel_path = build_wheel(session)
    session.install("-qq", "-r", CONSTRAINTS)
    session.install(
        "-qq", "-c", CONSTRAINTS, f"{wheel_path}[test]", "-r", "packaging/programs-needs.txt"
    )
    session.install("-qq", "--no-deps", "--force-reinstall", str(wheel_path))
    session.install("-qq", "--no-deps", "-r", "packaging/programs.txt")
    # One environment holds one release of a name: the older is found by its path.
    older = Path(session.virtualenv.location, "opennmt-1.1.1").absolute()
    session.install("-qq", "--no-deps", "--upgrade", "--target", str(older), "OpenNMT-py==1.1.1")
    # catalyst installs a package `tests`, which spawned processes would import as ours.
    remove = "shutil.rmtree(sysconfig.get_path('purelib') + '/tests', ignore_errors=True)"
    session.run("python", "-c", f"import shutil, sysconfig; {remove}")
    skip = "--ignore=tests/clients/test_transformers.py"  # it has its own versions, in `clients`
    session.run(
        "python", "-m", "pytest", "-m", "clients",
        *(session.posargs or ["tests/clients", "tests/package", skip]),
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@nox.session(reuse_venv=False)
@nox.parametrize("torch", ["2.6.0", "2.8.0", "2.10.0", "2.15.0"])
def matrix(session, torch):
    """The tests that depend on torch, on its oldest and newest supported release and two between.

    PyPI's wheels of these bring CUDA's libraries: some 6 GB each, removed when its tests are done.
    """
    free = shutil.disk_usage(".").free / 1e9
    if free < 12:
        session.skip(
            f"torch {torch} takes 6 GB to install and 6 to download; {free:.0f} GB are free"
        )
    wheel_path = build_wheel(session)
    try:
        session.install("-qq", "--no-cache-dir", f"torch=={torch}", f"{wheel_path}[test]")
        folders = "parity casts loop model checkpoint names compiled"
        session.run(
            "python", "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider",
            *(session.posargs or [f"tests/{name}" for name in (*folders.split(), "distributed")]),
            env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def build_wheel(session):
    """Builds the wheel with the hatchling of the environment that runs nox; returns its path."""
    for old in DIST.glob("apex_amp-*"):
        old.unlink()
    session.run(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(DIST), external=True
    )
    (built,) = DIST.glob("apex_amp-*-py3-none-any.whl")
    return built
