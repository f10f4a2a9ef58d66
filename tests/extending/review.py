"""A topology: the solver drafts, the planner reviews the draft, and the solver answers again.

python -m marft_jax.train --team.workflow review:review
"""

from marft_jax.team import State, Step


def review(team, observation):
    state = State(observation)
    while True:
        turns = yield [team.act(1, state)]
        turns += yield [team.act(0, state, turns)]
        turns += yield [team.act(1, state, turns)]
        result = yield Step(turns)
        if result.done:
            return
        state = state.after(turns, result)
