"""amp's memory is process-wide: each test here starts as a fresh process would."""

import gc

import pytest

from apex.amp import _amp_state


@pytest.fixture(autouse=True)
def fresh_amp():
    _forget()
    yield
    _forget()


def _forget():
    _amp_state.release_handle()  # that of amp.init lives until the next one
    if _amp_state.sessions():
        gc.collect()  # sessions end with their models and optimizers
    _amp_state.__dict__.clear()
    type(_amp_state).__init__(_amp_state)
