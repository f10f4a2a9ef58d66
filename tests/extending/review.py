"""A topology: the solver drafts, the planner reviews the draft, and the solver answers again.

python -m marft_jax.train --team.workflow review:review
"""

from marft_jax.team.workflows import Scene, Step


def review(team, observation):
    scene = Scene(observation)
    while True:
        turns = yield [team.act(1, scene)]
        turns += yield [team.act(0, scene, turns)]
        turns += yield [team.act(1, scene, turns)]
        result = yield Step(turns)
        if result.done:
            return
        scene = scene.after(turns, result)
