"""Every test sees 8 virtual CPU devices, strict broadcasting and no network."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets that lies beside a checkout, where it does."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers of the first PyTorch implementation: the file that MARFT_GOLDEN names."""
    file = Path(os.environ.get("MARFT_GOLDEN", SHARED / "golden" / "marft_golden.json"))
    if not file.is_file():
        pytest.skip(f"no golden numbers in {file}; set MARFT_GOLDEN")
    return file
