"""The page: what it shows, that text stays text, and what it makes of directories in any state."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest
from commands import code_of
from run_files import EVENTS, START, episode, lines, turn, write_run

from marft_jax import plugins
from marft_jax.errors import BadInput, printable
from marft_jax.extras import report
from marft_jax.extras.report import card, choosing, command, evaluations, reading, serving
from marft_jax.extras.report.choosing import chosen_groups, chosen_steps
from marft_jax.extras.report.curves import curves, variants
from marft_jax.extras.report.episodes import LONGEST
from marft_jax.extras.report.page import render
from marft_jax.extras.report.reading import read_run, read_runs
from marft_jax.formats import foreign, jsonlines
from marft_jax.learning import settings as algorithms
from marft_jax.settings.config import Run


class Elements(HTMLParser):
    """The tags of a page, and its text without that of programs and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._program = "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._program = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._program = self._program and tag not in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self._program else data


def page_of(*folders: Path) -> str:
    return render([read_run(folder) for folder in folders])


def data_of(page: str) -> dict:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def test_a_page_has_all_that_a_run_has(tmp_path):
    text = Elements(page_of(write_run(tmp_path / "mine"))).text
    for shown in (
        "step 3 of 3, finished", "cpu mesh 1x1x1", "1:30 in steps", "run.steps", "Plan it.",
        'who "solver"', "10:00:05 no gradient", "Step 2", "all are shown",
        "all 4 episodes", "answer at 1", "found 6", "advantage -0.25", "expected 7",
        "with the action of planner (1)", "sums, step 3, single agent", "0.15 to 0.85", "jax 1",
    ):  # fmt: skip
        assert shown in " ".join(text.split()), shown


def test_settings_that_differ_from_the_default_come_first(tmp_path):
    page = page_of(write_run(tmp_path / "mine", seed=3))
    table = page.partition("Settings that differ from the default")[2].partition("</table>")[0]
    assert re.findall(r"<code>([\w.]+)</code>", table) == ["run.steps", "run.seed"]


@pytest.mark.parametrize("name", algorithms.SETTINGS)
def test_a_page_reads_the_named_runs_alone(name, tmp_path, monkeypatch):
    other = write_run(tmp_path / Run().dir)
    (other / "config.yaml").write_text("run: {seed: 7}\nalgo: {lr: 0.125, group_size: 1}\n")
    run = write_run(tmp_path / "mine")
    (run / "config.yaml").write_text(f"run: {{seed: 3}}\nalgo: {{name: {name}, lr: 0.25}}\n")
    monkeypatch.chdir(tmp_path)
    rows = {row.key: row for row in card.settings([read_run(run)])}
    assert (rows["run.seed"].default, rows["algo.lr"].default) == ("0", "auto")
    assert rows["algo.epochs"].default == str(algorithms.SETTINGS[name]().epochs)
    assert "0.125" not in page_of(run)


def test_the_same_task_at_two_steps_is_offered(tmp_path):
    page = page_of(write_run(tmp_path / "mine"))
    offered = page.partition('<ul class="repeated">')[2].partition("</ul>")[0]
    places = re.findall(r'<a href="#([\w-]+)">([^<]+)</a>', offered)
    assert {"Step 1", "Step 2", "Step 3", "sums, step 3, team"} <= {name for _, name in places}
    ids = {attributes.get("id") for _, attributes in Elements(page).tags}
    assert {place for place, _ in places} <= ids


def game(index: int, step: int = 0) -> dict:
    seats = [("planner", 1.5, "win"), ("solver", -1.5, "loss")]
    outcomes = {n: {"seat": i, "return": r, "outcome": o} for i, (n, r, o) in enumerate(seats)}
    info = {"moves": {"planner": "Bet"}, "illegal": ["solver"], "outcomes": outcomes}
    turns = [turn("planner", "I bet.", step=step), turn("solver", "Pass", step=step)]
    result = {"reward": 0.0, "done": True, "info": info}
    more = {"task": "kuhn_poker", "turns": turns, "results": [result]}
    return episode(index, ["", ""], 0.0, **more)


def test_a_game_tells_what_each_player_did_and_earned(tmp_path):
    run = write_run(tmp_path / "mine", steps=(1, 2))
    (run / "team.yaml").write_text((run / "team.yaml").read_text().replace("sequential", "players"))
    for step in (1, 2):
        lines(run / "transcripts" / f"{step}.jsonl", [game(0), game(1)])
    paid = {"agent/planner/reward": 1.5, "agent/solver/reward": -1.5}
    lines(run / "metrics.jsonl", [{"step": s, "reward/mean": 0.0, **paid} for s in (1, 2)])
    text = " ".join(Elements(page_of(run)).text.split())
    for shown in (
        "planner +1.5, solver -1.5 mean reward of each agent at the last step",
        "kuhn_poker, game 2",
        "mean earnings: planner +1.5, solver -1.5", "plays Bet", "no legal move",
        "played planner won (+1.5), solver lost (-1.5)",
    ):  # fmt: skip
        assert shown in text, shown
    assert "ungraded" not in text and "mean reward 0" not in text


@pytest.mark.parametrize("step", [-1, -5, 7])
def test_a_turn_of_a_step_that_is_none_has_a_page(step, tmp_path):
    run = write_run(tmp_path / "mine")
    lines(run / "transcripts" / "3.jsonl", [game(0, step)])
    assert "I bet." in page_of(run)


def test_a_directory_with_any_name_is_printed_as_text(tmp_path, capsys):
    run = write_run(tmp_path / os.fsdecode(b"a\x1b[31m\xff"))
    command.write([run], tmp_path / "out\x1b[31m.html")
    page = next(tmp_path.glob("*.html")).read_text("utf-8")
    assert "\x1b" not in page + capsys.readouterr().out and "a\\x1b[31m\\udcff" in page


def test_the_algorithm_is_among_what_was_changed(tmp_path):
    run = write_run(tmp_path / "mine")
    (run / "config.yaml").write_text("algo: {name: grpo, group_size: 8}\nenv: {name: math}\n")
    rows = {row.key: row for row in card.settings([read_run(run)])}
    assert (rows["algo.name"].changed, rows["algo.name"].default) == ("given", "appo")
    assert (rows["env.name"].changed, rows["env.name"].default) == ("given", "arithmetic")


def changed_run(folder: Path, *events: dict) -> Path:
    """A run of 12 steps with these events."""
    run = write_run(folder, steps=range(1, 13))
    lines(run / "events.jsonl", events)
    return run


def changed(step: int, key: str, was: object, now: object) -> dict:
    return {"step": step, "event": "changed", "setting": key, "was": was, "now": now}


@pytest.mark.parametrize(
    ("events", "changes", "shown"),
    [
        ([START], [], {"env.difficulty": "4"}),
        ([START, changed(9, "env.difficulty", 1, 4)], ["step 9: env.difficulty was 1, is 4"],
         {"env.difficulty": "1; from step 9: 4"}),
        ([changed(3, "algo.lr", 0.1, 0.2), changed(3, "lora.targets", ["q"], ["q", "v"]),
          changed(7, "algo.lr", 0.2, 0.001), changed("7", "algo.epochs", 1, 2),
          changed(7, "team: solver.prompt", "'Add, is 3.'", "'Solve.'")],
         ["step 3: algo.lr was 0.1, is 0.2", "step 3: lora.targets was ['q'], is ['q', 'v']",
          "step 7: algo.lr was 0.2, is 0.001",
          "step 7: team: solver.prompt was 'Add, is 3.', is 'Solve.'"],
         {"algo.lr": "0.1; from step 3: 0.2; from step 7: 0.001"}),
    ],
)  # fmt: skip
def test_a_change_stands_at_its_step_in_the_table_and_in_the_curves(
    events, changes, shown, tmp_path
):
    run = changed_run(tmp_path / "mine", *events)
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("difficulty: 3", "difficulty: 4"))
    rows = {row.key: row for row in card.settings([read_run(run)])}
    for key, value in shown.items():
        assert rows[key].values == [value] and rows[key].changed
    assert card.card(read_run(run)).changes == changes
    page = page_of(run)
    steps = sorted({int(re.findall(r"\d+", line)[0]) for line in changes})
    assert data_of(page)["runs"][0]["changed"] == steps
    assert all(html.escape(line) in page.replace("&#39;", "&#x27;") for line in changes)


DERIVED = START | {"derived": ["--model.context 512", "--algo.lr 0.001", "--lora.targets q k v o"]}


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([DERIVED], "auto"),
        ([START], "given"),
        ([DERIVED, changed(3, "model.context", 256, 512), changed(3, "lora.targets", [], [])],
         "given"),
    ],
)  # fmt: skip
def test_what_follows_from_the_base_was_not_changed(events, kind, tmp_path):
    run = changed_run(tmp_path / "mine", *events)
    text = (run / "config.yaml").read_text().replace("context: 256", "context: 512")
    text = text.replace("- all-linear", "- q\n  - k\n  - v\n  - o")
    (run / "config.yaml").write_text(text)
    rows = {row.key: row for row in card.settings([read_run(run)])}
    assert [rows[key].changed for key in ("model.context", "lora.targets")] == [kind] * 2


def test_a_card_says_where_the_reward_began_and_ended_and_how_the_run_did(tmp_path):
    text = " ".join(Elements(page_of(folder := write_run(tmp_path / "mine"))).text.split())
    assert "0.10 → 0.30 reward" in text and "step 3: 0.3" in text and "(reward/mean)" in text
    lines(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    events = [*EVENTS, {"event": "stopped", "step": 1}]
    lines(folder / "events.jsonl", events)
    text = Elements(page_of(folder)).text
    assert "step 1 of 3, stopped" in text and "0.50 reward" in " ".join(text.split())
    lines(folder / "events.jsonl", [*events, START])
    assert "stopped" not in Elements(page_of(folder)).text


HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=http://evil.example/x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="', "{{ 7 * 7 }}{% for x in y %}", "<!--",
    "\x1b]52;c;cm0=\x07 \x9b2J \r\0", "\u202eevil\u2066 \u200f", "\ud800", "&lt;b&gt;",
]  # fmt: skip


def test_text_of_others_is_text_wherever_it_stands(tmp_path):
    folder = write_run(tmp_path / "<b>run")
    bad = "".join(HOSTILE)
    rows = [
        episode(0, [bad, bad], task=bad, failed=bad, results=[
            {"info": {"reference": bad, bad: bad,
                      "verdicts": [{"agent": bad, "verdict": bad, "answer": bad}]}}]),
        {"task": bad, "turns": [turn(bad, bad, tool=bad, prompt=bad, sees=[0], step=bad)]},
    ]  # fmt: skip
    lines(folder / "transcripts" / "1.jsonl", rows)
    lines(folder / "evaluations" / "sums-3.jsonl", [row | {"benchmark": bad} for row in rows])
    lines(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 1, f"agent/{bad}/entropy": 1}])
    events = [
        dict.fromkeys(("time", "text"), bad) | {"event": "warning"},
        dict.fromkeys(("setting", "was", "now"), bad) | {"event": "changed", "step": 1},
        {"event": bad, "step": bad, "kind": bad, bad: bad},
        START | {"what": bad, "where": bad, "derived": [bad]},
    ]
    lines(folder / "events.jsonl", events)
    shown = Elements(page := page_of(folder))
    page.encode("utf-8")
    benign = Elements(page_of(write_run(tmp_path / "benign")))
    assert {tag for tag, _ in shown.tags} <= {tag for tag, _ in benign.tags} | {"h3"}
    assert [a for _, a in shown.tags if any(name.startswith("on") for name in a)] == []
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200f\u202a-\u202e\u2066-\u2069]", page)
    assert page.count("<script>") == 4 and page.count("</script>") == 5
    for text in (*HOSTILE[:5], "\\x1b]52;c;cm0=\\x07", "\\u202eevil\\u2066", "\\ud800", HOSTILE[8]):
        assert text in shown.text, text
    label = next(chart for chart in data_of(page)["charts"] if "*" in chart["name"])["lines"][0]
    assert label["label"] == printable(bad)


def test_only_the_programs_of_the_page_may_run_and_nothing_is_fetched(tmp_path):
    page = page_of(write_run(tmp_path / "mine"))
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == "'none'" and rules["script-src"].count("sha256-") == 4
    fetched = {"src", "href", "action", "data", "poster", "srcset"}
    links = [v for _, a in Elements(page).tags for k, v in a.items() if k in fetched]
    assert links and all(str(link).startswith("#") for link in links)
    assert "Leon Sorokin" in page  # the licence of what is in it


def test_long_lines_are_cut_in_the_middle_and_the_page_says_so(tmp_path):
    folder = write_run(tmp_path / "mine")
    long = "x" * 100_000 + "the end"
    lines(folder / "transcripts" / "1.jsonl", [episode(0, [long, "short"])])
    page = page_of(folder)
    assert "characters left out" in page and "the end" in page
    assert max(map(len, re.findall("x+", page))) == LONGEST // 2


@pytest.mark.parametrize(
    "missing", ["config.yaml", "team.yaml", "metrics.jsonl", "transcripts", "checkpoints"]
)
def test_what_is_missing_is_named_and_the_rest_is_shown(missing, tmp_path):
    folder = write_run(tmp_path / "mine")
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = Elements(page_of(folder)).text
    calm = missing in ("transcripts", "checkpoints")  # which may come
    named = text.partition("Missing or broken")[2][:200]
    assert (named == "" and f"{missing}/: none yet" in text) if calm else missing in named
    assert ("answer at 1" in text) == (missing != "transcripts")


def test_an_empty_directory_has_a_page(tmp_path):
    text = Elements(page_of(tmp_path)).text
    assert "No transcripts of" in text and "metrics.jsonl: missing" in text


def test_lines_that_are_half_written_or_no_objects_are_counted(tmp_path):
    folder = write_run(tmp_path / "mine")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    with (folder / "transcripts" / "3.jsonl").open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n"x"\n')
    notes = page_of(folder).partition("Missing or broken")[2].partition("</ul>")[0]
    for what in ("1 other line, the first is line 4", "3 other lines, the first is line 5"):
        assert f"expected a JSON object per line, got {what}" in notes


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path):
    folder = write_run(tmp_path / "mine")
    saved = folder / "checkpoints"
    shutil.copytree(saved / "3", saved / "2")
    shutil.copytree(saved / "3", saved / ".saving-4")
    assert read_run(folder).notes == []
    (saved / "2" / "manifest.json").unlink()
    run = read_run(folder)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [2, 3]
    assert run.notes == ["checkpoints/2/manifest.json: missing"]


def test_what_never_ends_is_named_and_not_read(tmp_path):
    folder = write_run(tmp_path / "mine")
    names = ["config.yaml", "team.yaml", "metrics.jsonl", "events.jsonl", "evaluations/x.jsonl",
             "checkpoints/3/meta.json", "checkpoints/3/manifest.json"]  # fmt: skip
    for i, name in enumerate(names):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name) if i % 2 else (folder / name).symlink_to("/dev/zero")
    notes = " ".join(read_run(folder).notes)
    evaluations.evaluations(run := read_run(folder), 1)
    notes = " ".join(run.notes)
    assert notes.count("not a regular file") == len(names)


def test_of_a_large_file_only_so_much_is_read(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "mine")
    monkeypatch.setattr(reading, "_MOST_OF_FILE", (folder / "metrics.jsonl").stat().st_size - 1)
    run = read_run(folder)
    assert [*run.metrics] == [1, 2]
    assert [note.partition(": only its ")[0] for note in run.notes] == ["metrics.jsonl"]


def test_what_a_run_may_write_is_read_and_shown(tmp_path):
    folder, deep = write_run(tmp_path / "mine"), {"deep": 1}
    for _ in range(foreign.DEEPEST // 2 - 1):
        deep = {"deep": deep}
    info = plugins.info_of("info", deep)
    row = episode(0, ["a", "b"], results=[{"reward": 1.0, "done": True, "info": info}])
    (folder / "transcripts" / "1.jsonl").write_text(jsonlines.dumps(row) + "\n")
    deeper = '{"results": [{"info": {"a": %s}}]}\n' % ("[" * 90 + "]" * 90)
    (folder / "transcripts" / "2.jsonl").write_text(deeper)  # of a release that wrote more
    text = page_of(folder)
    assert html.escape(jsonlines.dumps(info)) in text.replace("&#34;", "&quot;")
    assert "transcripts/2.jsonl: expected a JSON object per line, got 1 other line" in text


WRONG = [None, 3, "x", [], {}, [1], {"a": 1}, True, -1e400, 1 << 70]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_values_of_any_kind_anywhere_leave_a_page(wrong, tmp_path):
    folder = write_run(tmp_path / "mine")
    whole = episode(0, ["a", "b"])
    rows = [whole | {key: wrong} for key in whole] + [{"benchmark": wrong}]
    rows += [whole | {"turns": [whole["turns"][0] | {key: wrong}]} for key in whole["turns"][0]]
    rows += [whole | {"results": [{"info": {"verdicts": wrong, "reference": wrong}}]}]
    rows += [whole | {"results": [{"info": {"verdicts": [wrong, {"agent": wrong}]}}]}]
    lines(folder / "transcripts" / "1.jsonl", rows)
    lines(folder / "evaluations" / "sums-3.jsonl", rows)
    lines(folder / "demonstrations.jsonl", rows)
    lines(folder / "metrics.jsonl", [{"step": wrong, "reward/mean": 1}, {"step": 2, "x": wrong}])
    odd = {"step": wrong} | dict.fromkeys(("kind", "derived", "was"), wrong)
    events = [odd | {"event": event} for event in ("start", "stopped", "changed", "warning", wrong)]
    lines(folder / "events.jsonl", events)
    lines(folder / "checkpoints" / "3" / "meta.json", [{"metric": wrong, "versions": wrong}])
    lines(folder / "checkpoints" / "3" / "manifest.json", [{"meta.json": wrong, "x": [wrong]}])
    (folder / "team.yaml").write_text(json.dumps({"agents": wrong}))
    (folder / "config.yaml").write_text(json.dumps({"run": {"steps": wrong}, "algo": wrong}))
    Elements(page_of(folder))


def test_a_run_of_another_release_has_a_page(tmp_path):
    folder = write_run(tmp_path / "mine")
    (folder / "config.yaml").write_text("algo: {name: gone, twist: 3}\nenv: {name: gone too}\n")
    text = Elements(page_of(folder)).text
    assert "algo.twist" in text and "no such setting now" in text


def test_runs_that_differ_in_their_seed_alone_are_drawn_together(tmp_path):
    runs = [read_run(write_run(tmp_path / f"seed{i}", seed=i)) for i in range(2)]
    runs.append(read_run(write_run(tmp_path / "other", steps=(1, 2, 4))))
    assert variants(runs) == ["seed0, 2 seeds", "seed0, 2 seeds", "other"]
    drawn = curves(runs)
    assert drawn["steps"] == [1, 2, 3, 4]
    assert drawn["runs"][2]["metrics"]["reward/mean"] == [0.1, 0.2, None, 0.4]


def test_runs_of_the_same_name_go_by_their_paths_and_none_is_shown_twice(tmp_path):
    one, other = (write_run(tmp_path / name / "run", seed=i) for i, name in enumerate("ab"))
    assert [run.name for run in read_runs([one, other, one])] == [str(one), str(other)]


def test_a_curve_has_at_most_2000_points(tmp_path):
    run = read_run(write_run(tmp_path / "mine"))
    long = run._replace(metrics={s: {"reward/mean": float(s)} for s in range(1, 10_001)})
    drawn = curves([long])
    assert len(drawn["steps"]) == 2000 and drawn["steps"][::1999] == [1, 10_000]
    assert drawn["runs"][0]["metrics"]["reward/mean"] == drawn["steps"]
    assert "2000 of 10000 steps are drawn" in " ".join(Elements(render([long])).text.split())
    assert curves([run])["steps"] == [1, 2, 3]


@pytest.mark.parametrize("best", [5, 10, 500, 905, 1000])
def test_the_last_the_best_and_evenly_spaced_steps_are_shown(best):
    there = list(range(5, 1001, 5))
    steps = chosen_steps(there, dict.fromkeys(there, 1.0) | {best: 2.0, 7: 9.0}, 12)
    assert len(steps) == 12 and [*steps] == sorted(steps)
    assert steps[1000] == "last" and steps[best] == ("last" if best == 1000 else "best reward")
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 2 * 1000 / 11


def test_few_steps_are_all_shown():
    assert chosen_steps([], {}, 12) == {}
    assert chosen_steps([1, 2, 3], {2: 1.0}, 12) == {
        1: "all are shown", 2: "best reward", 3: "last"
    }  # fmt: skip


def test_any_transcribed_step_can_be_asked_for(tmp_path, capsys):
    folder, out = write_run(tmp_path / "mine", steps=range(1, 41)), tmp_path / "page.html"
    command = report.main, "--run", folder, "--out", out, "--steps"
    assert code_of(*command, "20:22") == 0
    text = Elements(out.read_text()).text
    assert "3 of 40 transcribed steps" in text and "answer at 21" in text
    assert "answer at 1\n" not in text and capsys.readouterr().out.startswith(f"{out}: 0.")
    assert code_of(*command, "20") == 2 and "--steps 20: expected" in capsys.readouterr().err


def test_a_large_step_shows_whole_groups_within_its_share(tmp_path):
    folder = write_run(tmp_path / "mine", steps=(1,))
    rows = [
        episode(i, ["x" * 5000, "y" * 5000], float(i == 40), member=m,
                failed="gone" if i == 50 else None)
        for i in range(64) for m in range(2)
    ]  # fmt: skip
    lines(folder / "transcripts" / "1.jsonl", rows)
    run = read_run(folder)
    episodes = choosing._episodes(run, "1.jsonl", "transcripts")
    groups, choice = chosen_groups(episodes, 200_000)
    assert groups[0].task == "task 0" and groups[-1].task > "task 5"
    assert all(len(group.episodes) == 2 for group in groups)
    assert sum(e.size for g in groups for e in g.episodes) < 200_000
    assert choice.startswith(f"{2 * len(groups)} of 128 episodes (")


def test_tokens_are_there_where_each_has_a_number(tmp_path):
    folder = write_run(tmp_path / "mine")
    own = {"pieces": ["a", "\x1b", "b "], "logprobs": [-0.5, -1, -0.125], "values": [1]}
    whole = episode(0, ["", ""])
    turns = [turn("planner", "a\x1bb", **own), turn("solver", "x", pieces=[1], logprobs=None)]
    lines(folder / "transcripts" / "1.jsonl", [whole | {"turns": turns}])
    tags = Elements(page_of(folder)).tags
    found = [json.loads(a["data-tokens"] or "") for _, a in tags if "data-tokens" in a]
    assert found == [{"lengths": [1, 4, 2], "log-prob": [-0.5, -1, -0.125]}]


def test_without_a_page_to_write_a_line_tells_how_far_each_run_is(tmp_path, capsys):
    write_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    assert code_of(command.main, "--run", tmp_path / "a", tmp_path / "empty") == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(row.startswith("a 3 of 3, finished 0.300 0.300 at 3 2026-01-01") for row in rows)
    assert "empty 0 unknown" in rows


@pytest.mark.parametrize(
    ("run", "out", "shown"),
    [
        ("nowhere", "page.html", "--run nowhere: expected a run directory"),
        ("mine", "nowhere/page.html", "--out nowhere/page.html: expected a file name"),
        ("mine", "mine", "--out mine: expected a file name"),
        ("mine", "mine/metrics.jsonl", "expected a new file or an HTML page"),
        ("empty", "page.html", "--run empty: expected a run directory, found none of config.yaml"),
        ("other", None, "--run other: expected a run directory, found none of config.yaml"),
    ],
)
def test_wrong_input_is_one_line(run, out, shown, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "mine")
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other/rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert code_of(report.main, "--run", run, *(["--out", out] if out else [])) == 2
    assert shown in capsys.readouterr().err
    assert (tmp_path / "mine" / "metrics.jsonl").read_text().startswith("{")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_run_that_has_just_begun_is_in_the_table_and_folders_beside_runs_do_no_harm(
    name, tmp_path, capsys
):
    for folder in ("young", "evaluations"):
        (tmp_path / folder).mkdir()
    (tmp_path / "young" / name).write_text("")
    assert code_of(report.main, "--run", *sorted(tmp_path.iterdir())) == 0
    assert "young" in capsys.readouterr().out


HOSTS = {
    "localhost": True, "LOCALHOST.:80": True, "127.0.0.1": True, "[::1]:80": True,
    "evil.example:80": False, "localhost.evil.example": False, "": False,
}  # fmt: skip


def test_what_is_served_is_for_this_machine_alone(tmp_path):
    folder = write_run(tmp_path / "mine", steps=range(1, 41))
    with serving.open_server([folder], 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def get(path: str, host: str = "localhost:1") -> tuple[int, str]:
            connection = HTTPConnection(*server.server_address)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        assert json.loads(get("/state")[1])["words"] == "mine: step 40 of 40"
        status, page = get("/?steps=20:22")
        assert status == 200 and "answer at 21" in page and 'href="?steps=1:12#dialogues"' in page
        assert [get(p)[0] for p in ("/?steps=x", "/../log.txt")] == [400, 404]
        answered = {host: get("/state", host=host)[0] for host in HOSTS}
        assert {host: status == 200 for host, status in answered.items()} == HOSTS
        assert "expected the first and the last step, like 40:60" in get("/?steps=x")[1]
        with pytest.raises(BadInput, match="expected a free port"):
            serving.open_server([folder], server.server_port)
        server.shutdown()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.0\r\nHost: a\r\nX:"])
def test_connections_that_never_end_their_heads_keep_few_threads_and_no_one_out(tmp_path, sent):
    folder, before = write_run(tmp_path / "mine", steps=range(1, 10)), threading.active_count()
    with serving.open_server([folder], 0) as server, contextlib.ExitStack() as held:
        Thread(target=server.serve_forever, daemon=True).start()
        for _ in range(200):
            held.enter_context(socket.create_connection(server.server_address)).sendall(sent)
        connection = HTTPConnection(*server.server_address, timeout=30)
        connection.request("GET", "/state", headers={"Host": "localhost:1"})
        assert json.loads(connection.getresponse().read())["words"] == "mine: step 9 of 9"
        deadline = time.monotonic() + 30
        while threading.active_count() - before > serving._MOST + 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.shutdown()


def test_a_served_page_survives_clients_that_leave_and_runs_that_go(tmp_path, capsys):
    folder = write_run(tmp_path / "mine", steps=range(1, 10))
    with serving.open_server([folder], 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def opened(path: str) -> socket.socket:
            client = socket.create_connection(server.server_address)
            client.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost:1\r\n\r\n".encode())
            return client

        leaver = opened("/")
        leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaver.close()  # with a reset
        shutil.rmtree(folder)
        with opened("/state") as client:
            assert b"expected a run directory" in client.makefile("rb").read()
        server.shutdown()
    assert capsys.readouterr().err == ""


def test_samples_of_the_same_turn_stand_side_by_side_with_their_returns(tmp_path):
    run = write_run(tmp_path / "tree", steps=(1,))
    anew = [episode(0, ["", ""], 0.75 - n / 2, branch=[1, n], turns=[turn("solver", f"anew {n}")])
            for n in (1, 2)]  # fmt: skip
    odd = episode(0, ["", ""], branch=[7, 1])  # Of a turn that is not there.
    lines(run / "transcripts" / "1.jsonl", [episode(0, ["plan", "own"]), *anew, odd])
    tree = re.search(r'<details class="tree".*?</table>', page_of(run), re.S)
    assert tree
    text = " ".join(Elements(tree[0]).text.split())
    assert "Tree of sample 1" in text and "2 solver" in text
    assert re.search(r"return 1 .*own return 0\.25 .*anew 1 return -0\.25 .*anew 2", text), text
    assert text.count("advantage -0.25") == 3 and "plan" not in text
    assert [tag for tag, _ in Elements(tree[0]).tags].count("td") == 3
