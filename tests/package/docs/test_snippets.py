"""Every snippet of the documentation runs.

Those with ``>>>`` are doctests of their page; the others run here, in order, in one namespace for
each page.
"""

import contextlib
import gc
import io
import re
import shlex

import pytest
import torch.distributed

from apex.cli import build_parser
from tests.package.docs.pages import PAGES, ROOT, blocks, name, shell


def plain(page):
    """Blocks of Python that no doctest runs, and the hidden ones that prepare for them."""
    return [
        (code, line)
        for language, code, line in blocks(page)
        if language == "setup" or (language == "python" and ">>>" not in code)
    ]


# The page on CUDA graphs runs on the emulated device: tests/gpu/test_graphs.py.
WITH_CODE = [page for page in PAGES if plain(page) and page.stem != "cuda_graphs"]
WITH_COMMANDS = [page for page in PAGES if shell(page)]


@pytest.fixture
def group_ended():
    """Ends the process group that a page began."""
    yield
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_snippets_of_a_page_run_in_order(page, group_ended):
    namespace = {"__name__": "snippet"}
    with contextlib.redirect_stdout(io.StringIO()):
        for code, line in plain(page):
            exec(compile("\n" * line + code, page, "exec"), namespace)
    namespace.clear()


MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def check_make(words):
    for target in words[1:]:
        assert "=" in target or f"\n{target}:" in MAKEFILE, target


def check_apex(words):
    build_parser().parse_args(words[1:])  # exits, with a message, where it does not know them


def check_python(words):
    if words[1] == "-m":
        path = ROOT / (words[2].replace(".", "/"))
        assert path.exists() or (ROOT / "src" / path.relative_to(ROOT)).exists(), words[2]
        return
    for word in words[1:]:
        assert not word.startswith("examples/") or (ROOT / word).exists(), word


def check_pip(words):
    assert words[1] in ("install", "uninstall"), words
    for word in words[2:]:
        assert word != "." or (ROOT / "pyproject.toml").exists()


def check_nothing(words):
    """A program of others, whose flags are theirs."""


CHECKS = {"apex": check_apex, "make": check_make, "pip": check_pip, "python": check_python}
CHECKS |= dict.fromkeys(("git", "torchrun"), check_nothing)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_name_what_there_is(page):
    for line in shell(page):
        words = shlex.split(re.split(r" (?:>|\||&&) ", line)[0], comments=True)
        while re.match(r"[A-Z_]+=", words[0]):  # a setting of the environment
            words = words[1:]
        assert words[0] in CHECKS, line
        CHECKS[words[0]](words)


def test_pages_have_both_kinds_of_snippets():
    """What makes the tests above worth their names."""
    assert len(WITH_CODE) >= 3
    assert len(WITH_COMMANDS) >= 3
