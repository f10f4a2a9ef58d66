"""A directed acyclic graph of acts: the dependency function D of a ``dag`` team, before it acts.

nodes:
  - {id: plan, role: planner}
  - {id: first, role: solver}
  - {id: second, role: solver, message: Solve it in another way.}
edges:
  - [plan, first]
  - [plan, second]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from marft_jax.config import BadInput


class Node(NamedTuple):
    """One act of a step.

    Attributes:
        id: its name in ``edges``.
        role: the name of the agent that acts here; one may act at several nodes.
        message: what it is told besides the task; empty for nothing.
    """

    id: str
    role: str
    message: str = ""


class Graph(NamedTuple):
    """Nodes, and which depend on which: an edge (a, b) says that b is shown what a wrote."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()

    def layers(self) -> list[list[Node]]:
        """Nodes whose sources have all acted, layer by layer, each in the order of ``nodes``."""
        waiting, acted, layers = list(self.nodes), set(), []
        while waiting:
            layer = [n for n in waiting if all(a in acted for a, b in self.edges if b == n.id)]
            if not layer:
                raise BadInput(
                    f"edges: expected no cycle, got one through {', '.join(n.id for n in waiting)}"
                )
            layers.append(layer)
            acted |= {node.id for node in layer}
            waiting = [node for node in waiting if node.id not in acted]
        return layers

    def ancestors(self, node: Node) -> set[str]:
        """The ids of all nodes that ``node`` depends on, directly or through others."""
        found: set[str] = set()
        open_ids = [node.id]
        while open_ids:
            at = open_ids.pop()
            fresh = {a for a, b in self.edges if b == at} - found
            found |= fresh
            open_ids += fresh
        return found


def check_graph(graph: Graph, roles: Sequence[str], source: str) -> None:
    """Checks a graph against the roles of its team.

    Raises:
        BadInput: no node, an id used twice, an unknown role, an edge from or to nowhere, or a
            cycle.
    """
    ids = [node.id for node in graph.nodes]
    if not ids:
        raise BadInput(f"{source}: a dag needs nodes, got none; list them below `nodes:`")
    for i, node in enumerate(graph.nodes):
        if node.id in ids[:i]:
            raise BadInput(f"{source}: nodes: expected distinct ids, got {node.id!r} twice")
        if node.role not in roles:
            raise BadInput(
                f"{source}: node {node.id!r}: expected a role of {', '.join(roles)}, "
                f"got {node.role!r}"
            )
    for edge in graph.edges:
        for end, at in zip(("source", "destination"), edge, strict=True):
            if at not in ids:
                raise BadInput(
                    f"{source}: edge {list(edge)}: unknown {end} {at!r}; known are {', '.join(ids)}"
                )
    try:
        graph.layers()
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
