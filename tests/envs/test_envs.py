"""Environments: rewards, held-out tasks, order, horizon, users' own classes, messages."""

import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from marft_jax import cli
from marft_jax.envs import arithmetic, base
from marft_jax.envs.base import BUILT_IN, Grade, QuestionEnv, Task, make, next_state, settings_type
from marft_jax.errors import BadInput
from marft_jax.plugins import load_plugin
from marft_jax.settings.config import EnvSettings
from marft_jax.team.profiles import Profile
from marft_jax.types import StepResult, Turn


def turn(text, answers=True, name="solver"):
    ids = np.zeros(1, np.int32)
    return Turn(0, name, 0, ids, ids, ids.astype(np.float32), text, answers, (), False, 1.0)


def config(**env) -> EnvSettings:
    return settings_type(env.get("name", "arithmetic"))(**env)


def score_of(text, reference):
    return Grade(float(text), "right")


@pytest.mark.parametrize("score", [0.5, -0.25, 1e-3, -1.0])
def test_rewards_arrive_as_the_floats_that_were_given(score):
    env = QuestionEnv(lambda seed: Task("q", "a"), score_of)
    env.reset(0)
    result = env.step([turn(str(score))])
    assert type(result.reward) is float and result.reward == score


def test_reward_is_the_mean_over_answering_agents():
    env = make(config(), "train").create()
    question = env.reset(3)
    answer = str(sum(map(int, question.removesuffix("=?").split("+"))))
    team = [turn("nonsense", answers=False, name="planner"), turn(answer), turn("no idea")]
    result = env.step(team)
    assert result.reward == 0.5 and result.done
    assert result.info["reference"] == answer
    assert [verdict["verdict"] for verdict in result.info["verdicts"]] == ["right", "no answer"]


def test_a_team_without_answering_agents_earns_nothing():
    env = make(config(), "train").create()
    env.reset(0)
    assert env.step([turn("1", answers=False)]).reward == 0.0


def test_the_judge_speaks_between_steps_until_right_or_the_horizon():
    env = make(config(horizon=3), "train").create()
    task = env.reset(0)
    answer = str(sum(map(int, task.removesuffix("=?").split("+"))))
    first = env.step([turn("hm", answers=False, name="planner"), turn("99")])
    told = f"{task}\nplanner: hm\nsolver: 99\njudge: The answer is incorrect."
    assert (first.observation, first.reward, first.done) == (told, 0.0, False)
    second = env.step([turn(answer)])
    assert (second.observation, second.done) == (f"{told}\nsolver: {answer}", True)
    env.reset(0)
    assert [env.step([turn("99")]).done for _ in range(3)] == [False, False, True]


def test_partial_scores_cannot_be_earned_twice_and_end_nothing():
    grades = {"a": Grade(0.25, "wrong", "", "One of four."), "b": Grade(1.0, "right")}
    env = QuestionEnv(lambda seed: Task("q", "a"), lambda text, _: grades[text], horizon=9)
    env.reset(0)
    results = [env.step([turn(text)]) for text in "aab"]
    assert [result.reward for result in results] == [0.25, 0.0, 0.75]
    assert [result.done for result in results] == [False, False, True]
    assert results[0].feedback == "judge: The answer is incorrect. One of four."
    assert results[0].observation == f"q\nsolver: a\n{results[0].feedback}"
    assert results[2].feedback == ""


def test_next_state_without_a_judge():
    assert next_state("s", [turn("t", name="a")], None) == "s\na: t"


@pytest.mark.parametrize("difficulty", [2, 3, 8])
def test_held_out_sums_never_appear_in_training(difficulty):
    held = {task.question for task in arithmetic.eval_tasks(difficulty, 0.1)}
    drawn = [arithmetic.train_task(seed, difficulty, 0.1).question for seed in range(3000)]
    assert held and not held & set(drawn)
    assert not any(base.held_out(question, 0.1) for question in drawn)


def test_sums_are_a_pure_function_of_the_seed_and_cover_the_training_tasks():
    source = make(config(difficulty=2), "train")
    first, again = ([source.create().reset(seed) for seed in range(1500)] for _ in range(2))
    assert first == again and source.size is None
    assert len(set(first)) == 100 - len(arithmetic.eval_tasks(2, 0.1))


def test_evaluation_enumerates_each_held_out_sum_once_in_a_fixed_order():
    source = make(config(), "eval")
    tasks = [source.create().reset(index) for index in range(source.size)]
    assert len(set(tasks)) == source.size == pytest.approx(100, abs=30)  # three deviations
    assert tasks == [make(config(), "eval").create().reset(index) for index in range(source.size)]
    assert tasks != sorted(tasks)


def test_the_held_out_share_is_the_same_everywhere():
    """The split is part of published numbers: it must not move between versions or machines."""
    share = [base.held_out(f"{a}+{b}=?", 0.1) for a in range(10) for b in range(10)]
    assert [index for index, held in enumerate(share) if held] == HELD_OUT_PAIRS
    held = np.mean([base.held_out(f"task {i}", 0.3) for i in range(5000)])
    assert math.isclose(held, 0.3, abs_tol=0.02)  # three deviations


HELD_OUT_PAIRS = [3, 4, 14, 23, 24, 26, 39, 51, 52, 57, 61, 79, 84, 87, 92, 96]


@pytest.mark.parametrize("text, verdict", [
    ("3+5=8, 8+9=17", "right"),
    ("17.", "right"),
    ("the answer is -17", "wrong"),
    ("17 or 18", "wrong"),
    ("17.5", "wrong"),
    ("1" * 5000, "wrong"),
    ("seventeen", "no answer"),
    ("", "no answer"),
])  # fmt: skip
def test_a_sum_is_read_from_the_last_number(text, verdict):
    assert arithmetic.grade(text, "17").verdict == verdict


def test_no_product_is_both_learned_and_held_out():
    name = "configs.studies.products:Products"
    of = {split: make(config(name=name), split).create() for split in ("train", "eval")}
    learned, held = ({of[split].reset(seed) for seed in range(2000)} for split in ("train", "eval"))
    assert len(learned) + len(held) == 648 and not learned & held
    assert len(held) == pytest.approx(130, abs=20)  # a fifth of 648; two deviations


def test_each_agent_of_the_relay_sees_its_own_digits_and_the_answer_needs_all():
    relay = make(config(name="configs.studies.relay:Relay"), "train").create()
    digits = relay.reset(4).removesuffix("=?").split("+")
    seen = {agent: relay.view(agent, "+".join(digits) + "=?") for agent in ("planner", "solver")}
    assert seen == {"planner": f"{digits[0]}+{digits[1]}+?=?", "solver": f"?+?+{digits[2]}=?"}
    total = sum(map(int, digits))
    assert relay.step([turn(str(total))]).reward == 1.0
    assert relay.step([turn(digits[2])]).reward == 0.0


def test_extreme_splits_are_refused_in_one_line():
    with pytest.raises(BadInput, match="lower it"):
        make(config(holdout=1.0), "train")
    with pytest.raises(BadInput, match="raise it"):
        make(config(holdout=0.0), "eval")


OWN = """
import dataclasses
from marft_jax.envs.base import BUILT_IN, Own
from marft_jax.types import StepResult

class Echo:
    def reset(self, seed):
        return f"say {seed}"
    def step(self, turns):
        return StepResult("", -0.75, True)

class Split(Echo):
    def __init__(self, split):
        self.split = split
    def reset(self, seed):
        return self.split

class Needy(Echo):
    def __init__(self, path):
        pass

class Sized(Echo):
    def __init__(self, path, size=3, share=0.5, words="a", twice=False, *, split="train", level=2):
        self.options = path, size, share, words, twice

class Leveled(Echo):
    levels = 3
    def __init__(self, size=3, level=2):
        self.options = size, level

@dataclasses.dataclass(frozen=True)
class Wanted(Own):
    most: int = 9
    wide: bool = False

class Declares(Echo):
    Settings = Wanted
    def __init__(self, settings):
        self.settings = settings

class NoStep:
    def reset(self, seed):
        return ""

class Short(NoStep):
    def step(self):
        return None

class Seedless(Echo):
    def reset(self):
        return ""

class Half(NoStep):
    step = None

class Free(Echo):
    @staticmethod
    def step(turns, more=()):
        return StepResult("", 1.0, True)

def shy(task):
    return 1.0

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_envs.py").write_text(OWN)
    (tmp_path / "broken_envs.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_class_is_found_and_its_rewards_pass_unchanged(own):
    env = make(config(name="own_envs:Echo"), "train").create()
    assert env.reset(5) == "say 5"
    assert env.step([turn("5")]) == StepResult("", -0.75, True)


def test_a_users_class_gets_other_seeds_in_evaluation_or_is_told_the_split(own):
    assert make(config(name="own_envs:Echo"), "eval").create().reset(5) != "say 5"
    assert make(config(name="own_envs:Split"), "eval").create().reset(5) == "eval"
    assert make(config(name="own_envs:Split"), "train").create().reset(5) == "train"


def test_options_of_a_users_class_have_the_types_of_its_defaults(own):
    """A text that looks like a number stays one, and a whole number is a float too."""
    given = ("path=/x=y", "size=7", "share=1", "words=007", "twice=true")
    source = make(config(name="own_envs:Sized", options=given), "train")
    assert source.create().options == ("/x=y", 7, 1.0, "007", True)
    assert type(source.create().options[2]) is float
    source = make(config(name="own_envs:Sized", options=('path=["a", "b"]',)), "eval")
    assert source.create().options == (["a", "b"], 3, 0.5, "a", False)


def test_a_users_class_may_have_a_method_that_is_no_function_of_self(own):
    env = make(config(name="own_envs:Free"), "train").create()
    assert env.step([turn("5")]).reward == 1.0


def test_a_users_class_may_declare_settings_which_are_flags_then(own):
    name = "own_envs:Declares"
    settings = cli.parse(["--env.name", name, "--env.most", "20"]).env
    assert make(settings, "train").create().settings == settings
    assert (settings.most, settings.wide) == (20, False)
    for flags, message in (
        (["--env.most", "x"], "--env.most: expected a whole number, got 'x'"),
        (["--env.difficulty", "4"], f"unknown setting for --env.name {name}"),
    ):
        with pytest.raises(BadInput, match=message):
            cli.parse(["--env.name", name, *flags])


def test_options_and_levels_of_difficulty_go_together(own):
    source = make(config(name="own_envs:Leveled", options=("size=4",)), "train")
    made = [create().options for create in (*source.easier, source.create)]
    assert made == [(4, 0), (4, 1), (4, 2)]


@pytest.mark.parametrize("option, message", [
    ("size", "expected name=value, got 'size'"),
    ("sise=3", "takes path, size, share, words, twice, got 'sise=3'"),
    ("split=eval", "takes path, size, share, words, twice, got 'split=eval'"),
    ("size=big", "takes size=3 or another int, got 'size=big'"),
    ("size=true", "takes size=3 or another int, got 'size=true'"),
    ("share=half", "takes share=0.5 or another float, got 'share=half'"),
])  # fmt: skip
def test_a_wrong_option_of_a_users_class_is_one_clear_line(own, option, message):
    with pytest.raises(BadInput) as error:
        make(config(name="own_envs:Sized", options=("path=x", option)), "train")
    text = str(error.value)
    assert text.startswith("--env.options: ") and message in text and "\n" not in text


def test_a_users_class_without_options_takes_none(own):
    with pytest.raises(BadInput, match="own_envs:Echo takes no options, got 'a=1'"):
        make(config(name="own_envs:Echo", options=("a=1",)), "train")


@pytest.mark.parametrize("name, message", [
    ("arithmetics", f"expected {', '.join(BUILT_IN)} or package.module:Class"),
    ("own_envs:", "package.module:Class"),
    ("own_envs:Missing", "has no 'Missing'"),
    ("own_envs:NoStep", "without step"),
    ("own_envs:Needy", "missing a required argument: 'path'; give its parameters"),
    ("own_envs:number", "expected a class with reset(seed) and step(turns), got 3"),
    ("own_envs:Short", "step: expected a function of (self, turns), got one of (self) ("),
    ("own_envs:Seedless", "reset: expected a function of (self, seed), got one of (self) ("),
    ("own_envs:Half", "own_envs:Half: step: expected a function of (self, turns), got None"),
    ("own_envs:shy", "; an agent program is a function of (task, client)"),
    ("nowhere.at_all:Env", "cannot import nowhere.at_all"),
    ("broken_envs:Env", "no_such_thing"),
])  # fmt: skip
def test_a_wrong_environment_name_is_one_clear_line(own, name, message):
    with pytest.raises(BadInput) as error:
        make(config(name=name), "train")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_environments_are_importable_without_jax(repository):
    """Workers and tools import them; JAX would cost each a second and hundreds of megabytes."""
    program = textwrap.dedent("""
        import sys
        import marft_jax.envs.base, marft_jax.envs.arithmetic, marft_jax.envs.maths
        import marft_jax.envs.grading.worker
        loaded = [name for name in ("jax", "sympy", "datasets") if name in sys.modules]
        assert not loaded, loaded
    """)
    subprocess.run([sys.executable, "-c", program], cwd=repository, check=True)


def test_plan_path_pays_moves_as_published_and_demonstrates_shortest_paths():
    name = "configs.studies.plan_path:PlanPath"
    source, tasks = make(config(name=name, options=("size=4", "moves=9")), "train"), set()
    for seed in range(40):
        path = source.create()
        grid = path.reset(seed)
        [line] = path.demonstrate([Profile("mover", answers=True)])
        assert grid == source.create().reset(seed) and grid.count("A") == grid.count("G") == 1
        tasks.add(grid)
        n = len(line["text"])
        result = path.step([turn(line["text"])])
        assert result.reward == pytest.approx(1.5 - 0.01 * n) and result.done
    assert len(tasks) > 30
    held_out = make(config(name=name, options=("size=4",)), "eval").create()
    assert not tasks & {held_out.reset(seed) for seed in range(40)}


def test_plan_path_goes_on_from_where_it_stands_and_charges_walls():
    path = load_plugin("configs.studies.plan_path:PlanPath", "--env.name", ())()
    path.reset(0)
    path._walls, path._at, path._goal = frozenset({(0, 1)}), (0, 0), (2, 2)
    path._best = 4
    assert path._shown() == "A#.\n...\n..G"
    wall = path.step([turn("R")])
    assert wall.reward == pytest.approx(-0.11) and not wall.done and wall.observation[0] == "A"
    assert path.step([turn("no idea")]).reward == pytest.approx(-0.10)
    path._left = 2
    assert path.step([turn("go DDRR")]).reward == pytest.approx(-0.03)  # Three moves count.
    last = path.step([turn("R")])
    assert last.reward == pytest.approx(0.99) and last.done and last.info["arrived"]  # Not optimal.


def test_plan_paths_simulator_says_where_moves_lead():
    path = load_plugin("configs.studies.plan_path:PlanPath", "--env.name", ())(simulator=True)
    path.reset(0)
    path._walls, path._at, path._goal = frozenset({(0, 1)}), (0, 0), (2, 1)
    tried = {text: path.tool(turn(text)) for text in ("?R", "?DDR", "?D", "DDR")}
    assert tried == {"?R": "wall", "?DDR": "goal", "?D": "free", "DDR": None}
    assert path._at == (0, 0)


@pytest.mark.parametrize(
    ("wrote", "graded"),
    [
        ("<think>It is 5? No.</think>It is 7.", "It is 7."),
        ("It is 5?</think>\nIt is 7.", "It is 7."),  # the prompt opened it
        ("<think>It is 5?", ""),  # cut off in its thoughts
        ("<think>5</think><think>6</think>7", "7"),
        ("I think> 7", "I think> 7"),
    ],
)
def test_what_an_agent_thinks_is_not_graded(wrote, graded):
    seen = []

    def grade(text, answer):
        seen.append(text)
        return Grade(0.0, "wrong")

    env = QuestionEnv(lambda seed: Task("q", "7"), grade)
    env.reset(0)
    env.step([turn(wrote)])
    assert seen == [graded]
