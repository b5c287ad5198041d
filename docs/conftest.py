"""Doctests of the pages: each starts without the sessions of earlier pages."""

import gc

import pytest

collect_ignore = ["conf.py"]  # imports Sphinx, which the tests do not need


@pytest.fixture(autouse=True)
def alone():
    """Pages show ``amp.state_dict()``, which lists every living session."""
    gc.collect()
