"""scripts/first_light.sh: a part that fails stops no other, and what is broken is seen."""

from __future__ import annotations

import json
import sys
import time

import jax
import pytest

from marft_jax.models.ops import platforms


@pytest.fixture(autouse=True)
def scripts(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "scripts"))


@pytest.fixture
def first_light(scripts):
    import first_light

    return first_light


@pytest.fixture
def parity(scripts, one_device):
    import check_parity

    return check_parity


def operations(parity) -> list[bool]:
    checks = [check for check in parity.checks() if check.name.startswith("operation")]
    assert len(checks) == len(platforms.FORMS)
    return [parity.outcome(check)["passed"] for check in checks]


@pytest.mark.slow
def test_every_operation_is_compared_and_a_broken_form_fails(parity, monkeypatch):
    assert all(operations(parity))
    broken = next(f for f in platforms.FORMS if f.__name__ == "_sum")
    monkeypatch.setitem(platforms.FORMS, broken, {"cpu": lambda x: 1.001 * x.sum(-1)})
    assert operations(parity).count(False) == 1


def test_a_check_that_raises_is_a_line_that_failed(parity):
    found = parity.outcome(parity.Check("mine", 1.0, lambda: 1 // 0))
    assert (found["passed"], found["measured"]) == (False, None)
    assert "ZeroDivisionError" in found["error"]


@pytest.mark.parametrize("kind, flops", [
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA GeForce RTX 4090", 165e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", None),
])  # fmt: skip
def test_a_device_is_known_by_its_kind_or_not_at_all(first_light, kind, flops):
    peak = first_light.peak_of(kind)
    assert (peak and peak.flops) == flops


def part(first_light, code: str, limit_s: float = 30):
    def read(out: str):
        return [first_light.Line("number", f"{json.loads(out)}")], None

    return first_light.Part("mine", limit_s, [sys.executable, "-c", code], read)


@pytest.mark.slow
def test_a_part_that_hangs_is_stopped_with_what_it_started(first_light, tmp_path):
    left = tmp_path / "left"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(left)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    result = first_light.take(part(first_light, code, limit_s=1), patience=1)
    measured = result["lines"][-1]["measured"]
    assert not result["passed"] and measured.startswith("not done after 1 s; ")
    assert measured.endswith("on a busy machine: --patience 2")
    time.sleep(2)
    assert not left.exists()


@pytest.mark.parametrize("code, passed, measured", [
    ("print(7)", True, "7"),
    ("print('seven')", False, "JSONDecodeError"),
    ("print(7); import os, sys; print('no room', file=sys.stderr); os._exit(3)", False,
     "exit code 3: no room"),
])  # fmt: skip
def test_a_part_that_fails_is_a_line(first_light, code, passed, measured):
    result = first_light.take(part(first_light, code), patience=1)
    assert result["passed"] is passed and measured in result["lines"][-1]["measured"]


def test_fractions_are_of_the_data_sheet_of_all_devices(first_light):
    on = {"platform": "gpu", "device": "NVIDIA H200", "devices": 2}
    update, decode = (
        {"flops_per_s": 989e12, "bytes_per_s": b, "tokens_per_s": 100} for b in (0, 2.4e12)
    )
    assert first_light.share(update, on).startswith("50.0% of the FLOP/s (MFU); bound 200")
    assert first_light.share(decode, on).startswith("25.0% of the bandwidth; bound 400")
    assert "no data sheet" in first_light.share(update, on | {"device": "Tesla T4"})
    assert first_light.share(update, on | {"platform": "cpu"}) == "not an accelerator"


def test_what_a_machine_is(first_light, one_device):
    lines, found = first_light.read_machine(json.dumps(first_light.describe_machine()))
    assert found["packages"]["jax"] == jax.__version__
    assert lines[0].measured == "1 x cpu"
