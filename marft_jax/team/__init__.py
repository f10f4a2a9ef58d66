"""A team: who acts when, and what each agent sees.

A topology of your own is a generator function that yields acts or a ``Step``, named as
``--team.workflow package.module:function``; ``workflows.py`` has examples.
"""

from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import State, Team
from marft_jax.team.protocol import Step
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import WORKFLOWS, Workflow, find_workflow

__all__ = [
    "WORKFLOWS",
    "Blueprint",
    "Profile",
    "State",
    "Step",
    "Team",
    "Workflow",
    "find_workflow",
]
