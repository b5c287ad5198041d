"""What the logger ``apex`` says."""

import logging

import pytest


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="apex")
    return lambda: [record.getMessage() for record in caplog.records]
