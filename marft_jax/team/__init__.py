"""A team: who acts when, and what each of its agents is shown.

A topology of your own is a generator function that yields acts or a ``Step``, named as
``--team.workflow package.module:function``; ``workflows`` shows how.
"""

from marft_jax.team.prompts import Scene, Team
from marft_jax.team.wishes import Step
from marft_jax.team.workflows import WORKFLOWS, Workflow, find_workflow

__all__ = ["WORKFLOWS", "Scene", "Step", "Team", "Workflow", "find_workflow"]
