"""What a setting decides is said where it is declared, and all that follows is read from there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from marft_jax.cli import configure, sections
from marft_jax.errors import BadInput
from marft_jax.run.compatibility import check_fits, setting_changes
from marft_jax.settings.config import Config, EnvSettings, RolloutSettings, Update
from marft_jax.settings.setting import settings, that_decide

WORDS = {"arrays", "run", "answers", "start", "nothing"}
KINDS = {
    **{name: kind for name, kind in sections.kinds({}).items()},
    **{f"{s}.{n}": k for s, u in sections.UNIONS.items() for n, k in u.members().items()},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_says_what_it_decides(name):
    kind = KINDS[name]
    for field in dataclasses.fields(kind):
        words = (field.metadata.get("decides") or kind.decides).split()
        assert words and set(words) <= WORDS, f"{name}: {field.name}"
        assert words in (["nothing"], ["start"]) or not {"nothing", "start"} & {*words}


@pytest.mark.parametrize("kind", [EnvSettings, Update, RolloutSettings])
def test_a_setting_of_a_users_own_decides_what_its_section_does(kind):
    @dataclasses.dataclass(frozen=True)
    class Mine(kind):
        twist: int = 3

    section = {EnvSettings: "env", Update: "algo", RolloutSettings: "rollout"}[kind]
    config = dataclasses.replace(configure(), **{section: Mine()})
    assert (f"{section}.twist" in that_decide("answers", config)) == (kind is not Update)


def saved(**changes: Any) -> dict[str, Any]:
    """What a checkpoint says of its run, with other settings."""
    config = json.loads(json.dumps(dataclasses.asdict(configure())))
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    team = {"workflow": "sequential"}
    return {"bases": {}, "agents": [], "adapters": [], "arrays": {}, "team": team, "config": config}


@pytest.mark.parametrize("key", [key for key, _ in settings(configure())])
def test_a_changed_setting_is_refused_or_named_as_it_decides(key, tmp_path):
    before, now = saved(), saved(**{key: "another"})
    fixed, of_run, start = (key in that_decide(w, Config) for w in ("arrays", "run", "start"))
    for continues in (True, False):
        if fixed or of_run and continues:
            with pytest.raises(BadInput, match=f"--{key} was .*, is another"):
                check_fits(before, now, tmp_path, continues)
        else:
            check_fits(before, now, tmp_path, continues)
    named = setting_changes(before["config"], now["config"])
    assert bool(named) != start and all(f"--{key} was" in str(one) for one in named)
