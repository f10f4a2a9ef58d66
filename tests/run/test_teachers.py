"""Distillation: teachers, what they see, and what their students learn from them."""

from __future__ import annotations

import bounds
import jax
import numpy as np
import one_step
import pytest
import small
from run_files import arrays_of, lines_of

from marft_jax import evaluate, train
from marft_jax.errors import BadInput
from marft_jax.learning import learner as learner_module
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import Distill, resolve
from marft_jax.learning.teaching import Teaching
from marft_jax.settings.config import Lora
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import State
from marft_jax.team.teachers import Teacher
from marft_jax.team.team_files import Blueprint, dump_team, load_team
from marft_jax.types import MAIN

ANSWER = "The correct answer is 7."


def learner_of(*teachers, adapters=None, **algo):
    """A learner of a planner and a solver on the small model, with these teachers."""
    profiles = tuple(
        Profile(name, prompt=name[:1], answers=name == "solver", teacher=teacher)
        for name, teacher in zip(("planner", "solver"), teachers, strict=True)
    )
    team, base = small.team_of(Blueprint(profiles), context=256), small.base()
    algo = Distill(episodes=4, microbatch_tokens=512, minibatches=1, epochs=1, **algo)
    lora = Lora(rank=small.RANK, alpha=small.ALPHA, targets=small.QV)
    settings = resolve(small.config(algo=algo, lora=lora), {MAIN: ("tiny", base.config)})
    on = tuple(MAIN if teacher else "" for teacher in teachers)
    owners = tuple(i if teacher else None for i, teacher in enumerate(teachers))
    teaching = Teaching({MAIN: base}, on, owners, {MAIN: adapters})
    how = find_algorithm("distill"), small.one_device(), teaching
    return Learner(settings, {MAIN: base}, team, *how), team


def episodes_of(team, answer="7", hint=""):
    """Episodes in which planner and solver act once; with the hint, as a teacher reads them."""
    rng, found = np.random.default_rng(0), []
    for number in range(4):
        turns = []
        for agent in (0, 1):
            prompt = team.act(agent, State(f"task {number}"), turns).prompt
            action = rng.integers(0, 256, 3 + agent)
            prompt = team.with_hint(agent, prompt, hint) if hint else prompt
            turns.append(small.turn(agent, prompt, action))
        episode = small.episode(number, turns, [float(number % 2)])
        [result] = episode.results
        info = {"reference": answer} if answer else {}
        found.append(episode._replace(results=[result._replace(info=info)]))
    return found


def learn(learner, episodes):
    rewards = [np.asarray([0, e.reward], np.float32) for e in episodes]
    batch = learner.pack(episodes, rewards)
    return batch, *learner.learn(learner.init(), batch, 0)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [None, small.adapters(2, seed=1)])
def test_the_advantage_of_a_token_is_the_difference_of_the_log_probs(adapters):
    """Against whole forward passes over the prompts that the teachers read."""
    learner, team = learner_of(Teacher(), Teacher(sees="answer"), adapters=adapters)
    episodes = episodes_of(team)
    batch, _, estimates, metrics = learn(learner, episodes)
    policy = adapters or jax.tree.map(lambda x: 0 * x, small.adapters(2))
    plain, hinted = (
        small.with_policy(read, policy, width=256)
        for read in (episodes, episodes_of(team, hint=ANSWER))
    )
    for e, episode in enumerate(episodes):
        read = np.concatenate([plain[e].turns[0].logprobs, hinted[e].turns[1].logprobs])
        own = np.concatenate([turn.logprobs for turn in episode.turns])
        gap = 2 * bounds.logprobs(tokens=256)  # of two log-probs
        np.testing.assert_allclose(estimates.advantages_EJ[e], read - own, atol=gap)
    first = batch.chain.agent_EJ == 0
    mean = -np.average(estimates.advantages_EJ[first], weights=batch.chain.mask_EJ[first])
    bounds.close(metrics["teacher_kl"][0], mean, bounds.sums(first.sum()), bounds.LOGITS)


@pytest.mark.slow
def test_an_agent_without_a_teacher_learns_nothing():
    """Bit-equal adapters, also where the other agent's teacher moves its own."""
    learner, team = learner_of(None, Teacher())
    before, (_, state, _, _) = learner.init(), learn(learner, episodes_of(team))
    assert one_step.same(one_step.member(state, 0), one_step.member(before, 0))
    assert not one_step.same(one_step.member(state, 1), one_step.member(before, 1))


def test_a_step_in_which_no_taught_agent_acts_teaches_nothing():
    """An orchestrator calls another specialist; a solo agent is not the one that is taught."""
    learner, team = learner_of(None, Teacher())
    untaught = [e._replace(turns=e.turns[:1]) for e in episodes_of(team)]
    batch = learner.pack(untaught, [np.asarray([e.reward], np.float32) for e in untaught])
    state, estimates, _ = learner.learn(learner.init(), batch, 0)
    assert not estimates.advantages_EJ.any() and int(state.step) == 1
    assert one_step.same(state.adapters, learner.init().adapters)


def test_a_teacher_whose_logprobs_are_no_numbers_stops_its_own_student_alone(monkeypatch):
    learner, team = learner_of(Teacher(), Teacher(sees="answer"))
    episodes = episodes_of(team)
    _, sound, _, _ = learn(learner, episodes)
    before, whole = learner.init(), learner_module.teacher_advantage

    def advantage(batch, *scored):
        return np.where(batch.chain.agent_EJ == 0, np.nan, whole(batch, *scored))

    monkeypatch.setattr(learner_module, "teacher_advantage", advantage)
    _, state, _, metrics = learn(learner, episodes)
    assert metrics["nonfinite"]["gradient"].tolist() == [1, 0]
    assert np.isnan(metrics["teacher_kl"][0]) and np.isfinite(metrics["teacher_kl"][1])
    assert one_step.same(one_step.member(state, 0), one_step.member(before, 0))
    assert one_step.same(one_step.member(state, 1), one_step.member(sound, 1))


def test_the_reward_is_learned_from_where_it_has_a_weight():
    both, team = learner_of(None, Teacher(), reward_coef=2.0, group_size=2)
    alone, _ = learner_of(None, Teacher())
    episodes = [e._replace(group=e.index // 2) for e in episodes_of(team)]
    (_, _, with_reward, _), (_, _, without, _) = learn(both, episodes), learn(alone, episodes)
    difference_EJ = with_reward.advantages_EJ - without.advantages_EJ
    signs = [-1.0, 1.0, -1.0, 1.0]  # 2 · (reward − mean of the two samples)
    expected = np.repeat(np.array(signs)[:, None], 7, 1)
    bounds.close(difference_EJ, expected, size=bounds.LOGITS)


def test_what_a_teacher_sees():
    [episode] = episodes_of(learner_of(None, Teacher())[1])[:1]
    assert Teacher().hint(episode, 0) == ""
    assert Teacher(sees="answer").hint(episode, 0) == ANSWER
    assert Teacher(sees="all").hint(episode, 0) == f"The whole task: task 0\n{ANSWER}"
    assert Teacher(sees="{state}, so {answer}").hint(episode, 0) == "task 0, so 7"
    ungraded = episode._replace(results=[episode.results[0]._replace(info={})])
    assert Teacher(sees="answer").hint(ungraded, 0) is None


def test_an_environment_without_answers_is_named():
    learner, team = learner_of(None, Teacher(sees="answer"))
    with pytest.raises(BadInput, match="expected the answer as `reference` in StepResult.info"):
        learner.pack(episodes_of(team, answer=""), [np.zeros(2, np.float32)] * 4)


TEAM = """
bases:
  other: {model: tiny}
teacher: {base: other, sees: answer}
agents:
  - {name: planner, prompt: plan}
  - {name: solver, prompt: solve, answers: true, teacher: {sees: all}}
"""


def test_a_team_file_with_teachers_is_written_as_it_is_read(tmp_path):
    file, again = tmp_path / "team.yaml", tmp_path / "again.yaml"
    file.write_text(TEAM + "  - {name: idle, trainable: false}")
    team = load_team(str(file))
    assert [t and (t.base, t.sees) for t in team.teachers] == [
        ("other", "answer"), ("main", "all"), None,
    ]  # fmt: skip
    again.write_text(dump_team(team))
    assert load_team(str(again)) == team


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (TEAM.replace("base: other", "base: othr"), "teacher: base: expected one of main, other"),
        (TEAM.replace("sees: all", "sees: everything"), "or a text that has {answer} or {state}"),
    ],
)
def test_a_team_file_with_a_wrong_teacher_is_refused(changed, message, tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(changed)
    with pytest.raises(BadInput) as caught:
        load_team(str(file))
    assert message in str(caught.value)


FLAGS = """--algo.name distill --algo.episodes 8 --run.steps 2 --run.save_every 1 --run.keep 9
--run.loggers none --run.transcripts_every 0""".split()


def run_train(folder, *flags):
    with pytest.raises(SystemExit) as left:
        train.main(["--run.dir", str(folder), *FLAGS, *flags])
    return left.value.code


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.release
def test_a_distillation_continues_and_keeps_no_state_of_its_teacher(tmp_path):
    (tmp_path / "team.yaml").write_text(TEAM)
    flags = "--team.file", str(tmp_path / "team.yaml")
    assert not run_train(tmp_path / "whole", *flags)
    assert not run_train(tmp_path / "whole", *flags, "--run.steps", "3")
    last = arrays_of(tmp_path / "whole", 3)
    assert [*last["policies"]] == ["main"]
    assert all("agent/solver/teacher_kl" in line for line in lines_of(tmp_path / "whole"))
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--run", str(tmp_path / "whole"), "--limit", "4"])
    assert not left.value.code


def test_teachers_and_their_algorithm_need_each_other(tmp_path, capsys):
    (tmp_path / "team.yaml").write_text(TEAM)
    file = "--team.file", str(tmp_path / "team.yaml")
    assert run_train(tmp_path / "run") == 2
    assert "expected `teacher:` in the team file together with" in capsys.readouterr().err
    assert run_train(tmp_path / "run", *file, "--algo.name", "grpo") == 2
    assert "together with --algo.name distill, got grpo" in capsys.readouterr().err
