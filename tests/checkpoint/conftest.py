from tests.amp.conftest import fresh_amp  # noqa: F401 - an autouse fixture
