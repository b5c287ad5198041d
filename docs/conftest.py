"""Doctests of the pages: each begins without the sessions of an earlier one."""

import gc

import pytest

collect_ignore = ["conf.py"]  # imports what builds the pages, which their tests do not need


@pytest.fixture(autouse=True)
def alone():
    """Pages show ``amp.state_dict()``, which lists every living session."""
    gc.collect()
