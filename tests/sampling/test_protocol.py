"""Every sampler keeps the protocol and can do what it declares; rollout asks for nothing more."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import small
from scripted import END, Scripted, Slow

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput, RunFailed, Stopped
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.rollout.rollout import Rollout
from marft_jax.rollout.source import Job, RolloutSource
from marft_jax.sampling import Batcher, Request, SamplerOfBases, version_of
from marft_jax.team.workflows import WORKFLOWS
from marft_jax.types import MAIN, Act, Sampling, Turn

WORD = (80, 97, 115, END)
FILTERS = {"top_k": 3, "top_p": 0.9, "min_p": 0.1}


SAMPLERS = {
    "engine": lambda: small.engine(eos_ids=(END,)),
    "script": lambda: Scripted(lambda request: "Pas"),
    "two bases": lambda: SamplerOfBases(
        {"other": Scripted(str), MAIN: small.engine(eos_ids=(END,))}
    ),
}


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    made = SAMPLERS[request.param]()
    made.load({MAIN: small.adapters(3)}, "7")
    return made


def requests(n=6, **changed):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 5 + i).astype(np.int32) for i in range(n)]
    made = [Request(p, i % 3, Sampling(12), (4, 0, i, 0, 0, 0)) for i, p in enumerate(prompts)]
    return [request._replace(**changed) for request in made]


@pytest.mark.slow
def test_each_request_is_answered_once_and_the_answer_names_the_version(sampler):
    """Invariant 23."""
    asked = requests()
    for completion in small.answers(sampler, asked):
        assert completion.version == "7"
        assert 0 < len(completion.ids) == len(completion.logprobs) <= 12
    sampler.load({MAIN: small.adapters(3)}, "8")
    assert {c.version for c in small.answers(sampler, asked)} == {"8"}


def test_a_sampler_that_repeats_gives_equal_requests_equal_answers(sampler):
    assert sampler.capabilities.repeats
    alone = [small.answers(sampler, [request])[0] for request in requests()]
    together = small.answers(sampler, requests()[::-1])[::-1]
    assert [c.ids.tolist() for c in alone] == [c.ids.tolist() for c in together]


def test_a_sampler_that_masks_draws_among_the_choices(sampler):
    assert sampler.capabilities.masks_choices
    found = small.answers(sampler, requests(choices=(WORD, (66, END))))
    assert all(tuple(c.ids.tolist()) in (WORD, (66, END)) for c in found)


def test_a_cancelled_request_is_not_answered_and_a_release_drops_all(sampler):
    first, second = (sampler.submit(request) for request in requests(2))
    sampler.cancel(first)
    found = []
    while sampler.busy:
        found += [ticket for ticket, _ in sampler.step()]
    assert found == [second]
    sampler.submit(requests(1)[0])
    sampler.release()
    assert not sampler.busy


def test_a_sampler_that_streams_shows_the_beginning_of_an_answer():
    engine = SAMPLERS["engine"]()
    assert engine.capabilities.streams
    ticket = engine.submit(requests(1, sampling=Sampling(12), choices=(WORD,))[0])
    engine.step()
    begun = engine.partial[ticket].tolist()
    assert begun and tuple(begun) == WORD[: len(begun)]


def test_every_base_has_started_before_one_is_waited_for():
    order = []

    class Noted(Scripted):
        def start(self):
            order.append("start")

        def step(self):
            order.append("step")
            return super().step()

    SamplerOfBases({MAIN: Noted(str), "other": Noted(str)}).step()
    assert order == ["start", "start", "step", "step"]


def one_act(team, observation):
    yield [Act(0, np.arange(3, dtype=np.int32), 0, (), team.sampling[0], choices=(WORD,))]


def test_what_a_sampler_cannot_do_is_refused_before_it_is_asked():
    sampler, team = Scripted(lambda request: "a"), small.team(1)
    able = sampler.capabilities
    filters = {name: Sampling(12, **{name: value}) for name, value in FILTERS.items()}
    for changed, less in [
        ({"choices": (WORD,)}, "masks_choices"),
        ({"form": "{}"}, "masks_choices"),
        *(({"sampling": sampling}, "policy_logprobs") for sampling in filters.values()),
    ]:
        [request] = requests(1, **changed)
        assert able.refusal(request) == ""
        assert able._replace(**{less: False}).refusal(request) != ""
    assert able._replace(policy_logprobs=False, masks_choices=False).refusal(requests(1)[0]) == ""
    sampler.capabilities = able._replace(masks_choices=False)
    rollout = Rollout(sampler, team, one_act, Slow, DaemonThreads())
    with pytest.raises(BadInput, match="--rollout.sampler: .* cannot restrict what it draws"):
        rollout.play(small.samples([0]), 0)
    assert not sampler.requests
    sampler.capabilities = able._replace(contexts={MAIN: team.contexts[0] - 1})
    with pytest.raises(BadInput, match=f"--model.context {team.contexts[0]}: expected at most"):
        Rollout(sampler, team, one_act, Slow, DaemonThreads())


def test_a_play_that_is_stopped_cancels_its_requests():
    sampler = Scripted(lambda request: "a", slots=1)
    rollout = Rollout(sampler, small.team(2), WORKFLOWS["sequential"], Slow, DaemonThreads(),
                      stop=lambda: bool(sampler.requests))  # fmt: skip
    with pytest.raises(Stopped):
        rollout.play(small.samples(range(4)), 0)
    assert sampler.requests and not sampler.busy


def test_each_member_is_sampled_by_its_base_and_none_waits_for_another():
    """Both bases have one slot. The large one samples 8 turns; the other's 4 take no more steps."""
    bases = {name: Scripted(lambda request, n=name: n, slots=1) for name in (MAIN, "large")}
    sampler, steps = SamplerOfBases(bases), []
    team = small.team(3)._replace(bases=(MAIN, "large", "large"), owners=(0, 0, 1))
    rollout = Rollout(sampler, team, WORKFLOWS["sequential"], lambda: Slow(1), DaemonThreads(),
                      report=lambda over: steps.append(sampler.busy))  # fmt: skip
    sampler.load({MAIN: small.adapters(), "large": small.adapters()}, "5")
    played = rollout.play(small.samples(range(4)), 0)
    said = [[(turn.text, turn.version) for turn in episode.turns] for episode in played.episodes]
    assert said == [[(MAIN, "5"), ("large", "5"), ("large", "5")]] * 4
    assert sorted(request.owner for request in bases["large"].requests) == [0] * 4 + [1] * 4
    assert sampler.capabilities.at_once == 2 and not sampler.busy
    assert len(bases["large"].batches) == 8 and sum(steps) <= 9


def test_a_context_that_is_longer_than_that_of_its_base_is_refused():
    small_one, large = (Scripted(str) for _ in range(2))
    able = small_one.capabilities
    small_one.capabilities = able._replace(contexts={MAIN: 100})
    large.capabilities = able._replace(contexts={"large": 1000})
    sampler = SamplerOfBases({MAIN: small_one, "large": large})
    team = small.team(2)._replace(bases=(MAIN, "large"), contexts=(100, 1000))
    Rollout(sampler, team, one_act, Slow, DaemonThreads())
    with pytest.raises(BadInput, match="--model.context 101: expected at most 100"):
        Rollout(sampler, team._replace(contexts=(101, 1000)), one_act, Slow, DaemonThreads())


def source_of(sampler, turns: list[Turn]) -> RolloutSource:
    episode = small.episode(0, turns, [1.0])
    played = Collected([], [], [episode], [], 0, 0, 0.0)
    return RolloutSource(Pipeline(False), sampler, None, lambda job, cancelled: played, 9, None)


def test_nothing_is_learned_from_a_turn_of_another_version():
    """Invariant 23."""
    sampler = Scripted(lambda request: "a")
    job = Job(attempt=3, updates=3, adapters={MAIN: small.adapters()}, level=0)
    digest = version_of(job.adapters)
    right, wrong = (small.turn(0, [1], [2])._replace(version=v) for v in (digest, "2"))
    played = source_of(sampler, [right])._play(job, lambda: False)
    assert played.updates == 3 and sampler._version == digest
    with pytest.raises(RunFailed, match=f"adapters of version {digest}, got version 2"):
        source_of(sampler, [right, wrong])._play(job, lambda: False)


def test_a_version_is_of_the_content_alone():
    one = {MAIN: small.adapters(3)}
    again = {MAIN: {name: dict(parts) for name, parts in small.adapters(3).items()}}
    assert version_of(one) == version_of(again)
    others = [small.adapters(3, seed=1), small.adapters(2)]
    changed = jax.tree.map(np.array, small.adapters(3))
    first = jax.tree.leaves(changed)[0]
    first.flat[0] = np.nextafter(first.flat[0], 9)
    versions = {version_of({MAIN: own}) for own in (*others, changed)}
    versions |= {version_of(x) for x in (one, {"other": one[MAIN]}, {**one, "b": one[MAIN]})}
    assert len(versions) == 6


def test_a_request_that_the_sampler_gives_up_costs_its_episode_alone():
    class GivesUp(Scripted):
        def step(self):
            return [
                (ticket, own._replace(reason="cancelled") if ticket == 2 else own)
                for ticket, own in super().step()
            ]

    sampler = GivesUp(lambda request: "a")
    rollout = Rollout(sampler, small.team(1), WORKFLOWS["sequential"], lambda: Slow(1),
                      DaemonThreads(), max_failed=0.5)  # fmt: skip
    played = rollout.play(small.samples(range(4)), 0)
    assert [e.index for e in played.episodes] == [0, 1, 3]
    assert [failed.why for failed in played.failed] == ["the sampler gave up a request"]


def test_callers_are_mixed_and_adapters_wait_for_them_only_where_they_must():
    def run(loads_while_busy):
        sampler, order = Scripted(lambda request: "a", slots=1), []
        sampler.capabilities = sampler.capabilities._replace(loads_while_busy=loads_while_busy)
        load, sampler.load = sampler.load, lambda *own: (order.append(own[1]), load(*own))
        batcher = Batcher(sampler)
        asked = [batcher.submit(request) for request in requests(3)]
        batcher._admit()
        loaded = batcher.load({MAIN: small.adapters(3)}, "new")
        with batcher:
            loaded.result(60)
            return [future.result(60).version for future in asked], order

    assert run(False) == (["", "", ""], ["new"])
    assert run(True) == (["new", "new", "new"], ["new"])
