"""Settings: one meaning wherever they are written, and one clear line where they are wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import yaml

from marft_jax.cli import configure, configure_run, parse, sections
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.learning.settings import SETTINGS, Appo
from marft_jax.settings import config as config_lib
from marft_jax.settings import setting
from marft_jax.settings.config import Config, dump
from marft_jax.team import team_files
from marft_jax.team.team_files import dump_team, load_team
from marft_jax.types import Sampling


@pytest.fixture
def file(tmp_path):
    """Writes a YAML file and returns its path as text."""

    def write(text: str, name: str = "settings.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def refused(argv: list[str]) -> str:
    """The message of a refused command line, after checking that it is one readable line."""
    with pytest.raises(BadInput) as caught:
        parse(argv)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    assert "---" not in message and "helptext" not in message
    return message


def test_defaults_are_the_quickstart():
    assert parse([]) == configure()


def test_a_later_setting_wins_and_flags_win_over_files(file):
    first = file("algo: {lr: 0.1, clip: 0.3, epochs: 7}", "1.yaml")
    second = file("algo: {lr: 0.2, clip: 0.4}", "2.yaml")
    algo = parse(["--algo.lr", "0.5", "--config", first, f"--config={second}"]).algo
    assert (algo.lr, algo.clip, algo.epochs) == (0.5, 0.4, 7)
    assert parse(["--algo.lr", "1", "--algo.lr=2"]).algo.lr == 2.0


def test_scientific_notation_in_yaml_is_a_float(file):
    algo = parse(["--config", file("algo: {lr: 1e-3, max_kl: 2E-4}")]).algo
    assert (algo.lr, algo.max_kl) == (1e-3, 2e-4)
    assert isinstance(algo.lr, float)


def test_lists_none_and_booleans_mean_the_same_in_files_and_flags(file):
    text = """
      lora: {targets: [q, k, down]}
      critic: {hidden: []}
      algo: {huber_delta: null}
      run: {loggers: []}
    """
    flags = ["--lora.targets", "q", "k", "down", "--critic.hidden", "--algo.huber_delta", "none"]
    from_flags = parse([*flags, "--run.loggers", "none"])
    assert parse(["--config", file(text)]) == from_flags
    assert from_flags.lora.targets == ("q", "k", "down") and from_flags.critic.hidden == ()
    assert from_flags.algo.huber_delta is None and from_flags.run.loggers == ()


def test_dump_and_parse_round_trip(file):
    changed = dataclasses.replace(
        configure(),
        run=config_lib.Run(dir="runs/ä: #1", seed=7, loggers=("a:b", "wandb")),
        team=config_lib.Team(file="1e3", temperature=0.0, top_k=5),
        algo=Appo(lr=1e-7, huber_delta=None, max_kl=1.7e-6, ratio="word"),
        lora=config_lib.Lora(targets=("o", "gate")),
        mesh=config_lib.Mesh(data=-1, fsdp=2),
    )
    for config in (configure(), changed):
        assert parse(["--config", file(dump(config))]) == config


@pytest.mark.parametrize(("argv", "names"), [
    (["--algo.epoch", "1"], ("algo.epoch", "did you mean 'algo.epochs'")),
    (["--zzz.qqq", "1"], ("zzz.qqq", "--help")),
    (["--lora.mode", "both"], ("--lora.mode", "per_agent", "shared", "both")),
    (["--algo.lr", "fast"], ("--algo.lr", "a number", "fast")),
    (["--run.steps", "3.5"], ("--run.steps", "whole number", "3.5")),
    (["--run.steps", "0"], ("--run.steps: expected a whole number from 1", "got '0'")),
    (["--algo.lr"], ("--algo.lr", "nothing")),
    (["--rollout.reuse", "maybe"], ("--rollout.reuse", "true or false")),
    (["--algo.max_kl", "low"], ("--algo.max_kl", "a number from 0 or none", "low")),
    (["--critic.hidden", "3", "x"], ("--critic.hidden", "whole numbers", "3 x")),
    (["stray"], ("stray",)),
    (["--config"], ("--config", "YAML")),
    (["--config", "no/such.yaml"], ("no/such.yaml", "No such file")),
    (["--algo.lr", "nan"], ("--algo.lr", "nan")),
    (["--algo.gamma", "1.5"], ("--algo.gamma", "a number from 0 to 1", "1.5")),
    (["--team.top_p", "0"], ("--team.top_p", "a number above 0 to 1")),
    (["--lora.targets", "q", "q"], ("--lora.targets", "distinct")),
    (["--team.max_new_tokens", "256"], ("--team.max_new_tokens", "--model.context 256")),
    (["--env.difficulty", "1000000"], ("--env.difficulty", "to 1000")),
    (["--model.base", "m.gguf", "--team.max_new_tokens", "1024"], ("--model.context 1024",)),
    (["--model.base", "m.gguf", "--team.max_new_tokens", "9999"], ("1024 (its default), got 9",)),
    (["--model.context", "20", "--team.max_new_tokens", "24"], ("--model.context 20, got 24",)),
    (["--temp", "1"], ("did you mean 'team.temperature' or 'eval.temperature'?",)),
    (["--team.temp", "1"], ("did you mean 'team.temperature'?",)),
    (["--lr", "1"], ("did you mean 'critic.lr' or 'algo.lr'?",)),
    (["--max_tokens", "1"], ("did you mean 'team.max_new_tokens'?",)),
    (["--rum.steps", "1"], ("did you mean 'run.steps'?",)),
    (["--lora.target_modules", "q"], ("did you mean 'lora.targets'?",)),
    (["--model.base", "None"], ("--model.base: expected text, got nothing",)),
])  # fmt: skip
def test_a_wrong_setting_is_one_line_with_what_was_expected(argv, names):
    message = refused(argv)
    assert all(name in message for name in names), message


@pytest.mark.parametrize(("text", "names"), [
    ("algo: {epochz: 1}", ("algo.epochz", "algo.epochs")),
    ("algo:\n  - lr\n", ("'algo'", "['lr']")),
    ("- run\n", ("sections like `run:`",)),
    ("algo: {lr: [", ("not YAML",)),
    ("algo: {lr: {a: 1}}", ("algo.lr", "{'a': 1}")),
    ("algo: {lr: [1, 2]}", ("--algo.lr", "1 2")),
    ("run: {steps: --x}", ("--run.steps", "--x")),
    ("run: {steps: 1, steps: 2}", ("'steps' stands twice",)),
    ("run: {dir: ''}", ("--run.dir", "an empty one")),
    ("algo: {lr: .inf}", ("--algo.lr", "inf")),
])  # fmt: skip
def test_a_wrong_file_is_one_line_with_what_was_expected(file, text, names):
    message = refused(["--config", file(text)])
    assert all(name in message for name in names), message


def test_a_type_may_be_a_number_or_a_word():
    read = [configure({"algo.lr": value}).algo.lr for value in ("auto", "1e-3", 0.5)]
    assert read == ["auto", 1e-3, 0.5]
    assert "expected a number from 0 or auto, got 'much'" in refused(["--algo.lr", "much"])


@pytest.mark.slow
def test_every_setting_is_read_somewhere(repository):
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted((repository / "marft_jax").rglob("*.py"))
        if path.name != "config.py"
    )
    kinds = {field.name: [type(field.default)] for field in dataclasses.fields(Config)}
    kinds["env"] = [*map(envs.settings_type, envs.BUILT_IN), envs.Own]
    kinds["algo"] = [*SETTINGS.values()]
    names = r"config|c|s|settings|algo|env|self|head|learning|own|kl|how|clipped|moving|part\(.*?\)"
    places = rf"(?=\b_?({'|'.join(kinds)}|{names})\.(\w+))"
    read = set(re.findall(places, sources))
    read_of_any = {name for owner, name in read if re.fullmatch(names, owner)}
    unread = {
        f"{section}.{field.name}"
        for section, some in kinds.items()
        if section != "mesh"  # read as a tuple; test_mesh.py sees each axis work
        for kind in some
        for field in dataclasses.fields(kind)
        if not (section == "team" and field.name in Sampling._fields)  # see test_roles.py
        if field.name not in read_of_any and (section, field.name) not in read
    }
    assert unread == set()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (256, 24)),  # the quickstart
        ({"model.base": "tiny"}, (256, 24)),
        ({"model.base": "m.gguf"}, (1024, 256)),
        ({"model.base": "owner/name", "model.context": 200}, (200, 50)),
        ({"model.base": "owner/name", "team.max_new_tokens": 24}, (1024, 24)),
        ({"model.base": "m.gguf", "model.context": 256, "team.max_new_tokens": 8}, (256, 8)),
    ],
)
def test_an_action_has_room_on_a_real_model_and_what_is_given_stays(given, lengths, file):
    config = configure(given)
    assert (config.model.context, config.team.max_new_tokens) == lengths
    assert parse([f"--{key}={value}" for key, value in given.items()]) == config
    saved = file(dump(config))  # a run directory shows what was used, and goes on with it
    assert f"max_new_tokens: {lengths[1]}\n" in dump(config)
    assert parse(["--config", saved]) == config


@pytest.mark.parametrize("value", ["", "null", "~", "[null]"])
def test_a_key_without_a_value_is_none_where_that_is_a_value_and_else_one_line(value, file):
    """For every setting: nothing is taken for a text that says None."""
    for section, kind in sections.kinds({}).items():
        for field in dataclasses.fields(kind):
            path = file(f"{section}: {{{field.name}: {value}}}")
            try:
                taken = setting.get(parse(["--config", path]), f"{section}.{field.name}")
            except BadInput as error:
                assert f"{section}.{field.name}" in str(error) and "\n" not in str(error)
            else:
                assert taken in (None, ()), (section, field.name)


def fits(value: object, schema: dict, known: dict) -> bool:
    """A small judge of JSON schemas, of the words that ours have; ``known``: its $defs."""
    if "$ref" in schema:
        return fits(value, known[schema["$ref"].rpartition("/")[2]], known)
    if "oneOf" in schema:
        return sum(fits(value, one, known) for one in schema["oneOf"]) == 1
    if "anyOf" in schema:
        return any(fits(value, one, known) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "type" not in schema:
        return True
    kind = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }[schema["type"]]  # fmt: skip
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        return False
    if isinstance(value, dict):
        keys, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        others = others if isinstance(others, dict) else {} if others else {"enum": []}
        return set(schema.get("required", ())) <= set(value) and all(
            fits(part, keys.get(key, others), known) for key, part in value.items()
        )
    if isinstance(value, list):
        each = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        return len(each) == len(value) and all(map(fits, value, each, [known] * len(value)))
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return value is None or low <= value <= high and value > schema.get("exclusiveMinimum", -1e99)


@pytest.mark.slow
def test_the_schema_of_settings_fits_what_loads_and_nothing_else(repository, capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--schema"])
    schema = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    files = [*(repository / "configs").glob("*.yaml"), *(repository / "configs").glob("plans/*")]
    texts = [re.sub(r"\b(\d)e-", r"\1.0e-", file.read_text()) for file in files if file.is_file()]
    trees = [yaml.safe_load(text) for text in texts]  # 1e-3 is a number for editors (YAML 1.2)
    trees += [yaml.safe_load(dump(configure({"algo.name": name}))) for name in SETTINGS]
    trees += [yaml.safe_load(dump(configure({"env.name": name}))) for name in envs.BUILT_IN]
    trees += [{"env": {"name": "mine:Env", "most": 3}}, {"run": {"steps": 1}}]
    assert len(trees) > 20
    assert [tree for tree in trees if not fits(tree, schema, {})] == []
    for wrong in (
        {"run": {"stepz": 1}},
        {"run": {"steps": 0}},
        {"env": {"name": "math", "difficulty": 3}},
        {"algo": {"name": "grpo", "gamma": 0.5}},
        {"algo": {"gamma": 1.5}},
        {"lora": {"mode": "both"}},
    ):
        assert not fits(wrong, schema, {}), wrong
    [help] = [one["description"] for one in schema["properties"]["lora"]["properties"].values()][:1]
    assert help.startswith("per_agent: one adapter for each agent.")


def test_the_schema_of_a_team_fits_what_loads_and_nothing_else(repository, capsys):
    with pytest.raises(SystemExit):
        parse(["--schema", "team"])
    schema = json.loads(capsys.readouterr().out)
    files = [*(repository / "configs").glob("teams/*.yaml"), *repository.glob("configs/*/teams/*")]
    blueprints = [load_team(str(file)) for file in files]
    trees = [yaml.safe_load(file.read_text()) for file in files]
    trees += [yaml.safe_load(dump_team(team)) for team in blueprints]
    agent = {"name": "a", "answers": True, "stop": "x", "tools": [{"calculator": {"cost": 1}}]}
    trees += [{"agents": [agent], "messages": [None], "nodes": [{"id": "x", "role": "a"}]}]
    assert len(trees) > 20
    assert [tree for tree in trees if not fits(tree, schema, schema["$defs"])] == []
    for wrong in (
        {"workflow": "solo"},
        {"agents": [{"prompt": "p"}]},
        {"agents": [{"name": "a", "top_p": 2}]},
        {"agents": [{"name": "a"}], "bases": {"x": {"modle": "tiny"}}},
        {"agents": [{"name": "a", "teacher": {"see": "all"}}]},
        {"agents": [{"name": "a"}], "edges": [["a"]]},
    ):
        assert not fits(wrong, schema, schema["$defs"]), wrong
    assert schema["$defs"]["Profile"]["properties"]["prompt"]["description"] == "System prompt."
    assert "--schema: expected nothing or team" in refused(["--schema", "all"])


def test_each_key_of_a_team_file_has_a_text_and_help_shows_it(capsys):
    with pytest.raises(SystemExit):
        parse(["--help", "team"])
    shown = capsys.readouterr().out
    assert shown.count("keys of a team file") == 1
    for above, kind in team_files.PARTS.items():
        for field in dataclasses.fields(kind):
            assert setting.texts(kind).get(field.name), (kind, field.name)
            assert f"    {above}{field.name}  " in shown
    assert "agents: top_p  a number above 0 to 1 or none (none)" in shown
    assert "agents: name  text (no default)" in shown


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_settings_file_in_another_encoding_is_to_be_saved_as_utf_8(tmp_path, name, encoding):
    text = '{"team": {"stop": ["caf\u00e9"]}}'
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(BadInput, match="save it as UTF-8") as caught:
        parse(["--config", str(tmp_path / name)])
    assert "\n" not in str(caught.value)


def test_a_run_of_before_keeps_its_settings_under_their_new_names(tmp_path):
    settings = {"algo": {"kl_moves": 7, "kl_coef": 0.1, "kl_reference": "start"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert configure_run(tmp_path).algo.kl_reference_every == 7
