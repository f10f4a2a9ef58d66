import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The eight of tests, before a topology asks for fewer."""
    return jax.devices()
