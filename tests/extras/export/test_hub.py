"""A team goes to the hub and comes back; without a token, or a repository, that is one line."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from huggingface_hub import constants
from imitated_hub import imitated
from run_files import write_run

from marft_jax.cli import configure
from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.export import card, hub
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.team_files import Blueprint


@pytest.fixture
def there(tmp_path, monkeypatch):
    with imitated(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def team(tmp_path):
    """A folder as an export writes it, as far as the hub is concerned."""
    folder = tmp_path / "team"
    (folder / "solver").mkdir(parents=True)
    (folder / "solver" / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "solver" / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    (folder / "team.yaml").write_text("agents: []\n")
    (folder / "client.py").write_text("print('it runs')\n")
    run = write_run(tmp_path / "run")
    facts = card.Facts(str(run), 3, configure(), Blueprint(BUILT_IN), "owner/base")
    card.write(folder, facts, {"solver": ["solver"]}, "owner/base")
    return folder


def test_a_team_is_pushed_with_a_valid_card_and_fetched_without_what_runs(there, team):
    assert hub.push(team, "me/sums", 3) == f"{there.url}/me/sums"
    assert set(there.files["me/sums"]) >= {"README.md", "client.py", "solver/adapter_config.json"}
    [text] = there.cards
    head = yaml.safe_load(re.findall(r"\A---\n(.*?)^---\n", text, re.S | re.M)[0])
    tags = ["marft", "multi-agent", "lora"]
    assert head == {"library_name": "peft", "base_model": "owner/base", "tags": tags}
    assert "[solver](solver)" in text and "| reward/mean | 0.3 |" in text
    back = hub.fetch("hub:me/sums")
    found = {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()}
    assert found == {"solver/adapter_config.json", "solver/adapter_model.safetensors", "team.yaml"}
    weights = "solver/adapter_model.safetensors"
    assert (back / weights).read_bytes() == (team / weights).read_bytes()


def test_a_hub_that_refuses_is_one_line(there, team, monkeypatch):
    with pytest.raises(BadInput, match=r"--lora.init hub:me/none: .*404"):
        hub.fetch("hub:me/none")
    with pytest.raises(BadInput, match="--push: expected owner/name, got 'sums'"):
        hub.push(team, "sums", 3)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(RunFailed, match=r"--push me/sums: .*401.*`hf auth login`"):
        hub.push(team, "me/sums", 3)
    assert there.files == {}


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_each_way_to_the_hub_is_one_line(offline, team, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(RunFailed, match="--push me/sums: .*; `hf auth login` gives a token$"):
        hub.push(team, "me/sums", 3)
    with pytest.raises(BadInput, match="--lora.init hub:me/sums: "):
        hub.fetch("hub:me/sums")


def test_a_token_that_is_none_is_not_printed(there, team, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secr\xe9t_abcdef")
    with pytest.raises(RunFailed, match="--push me/sums: ") as caught:
        hub.push(team, "me/sums", 3)
    assert "secr" not in str(caught.value) and "abcdef" not in str(caught.value)


def test_a_base_that_the_hub_does_not_know_is_not_in_the_head(tmp_path):
    run = write_run(tmp_path / "run")
    facts = card.Facts(str(run), 3, configure(), Blueprint(BUILT_IN), "tiny")
    card.write(tmp_path, facts, {"solver": ["solver"]})
    text = (tmp_path / "README.md").read_text()
    assert "base_model" not in text and "on the base `tiny`" in text
