"""A directed acyclic graph of acts: the fixed dependency function D of a ``dag`` team."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from typing import NamedTuple

from pydantic.dataclasses import dataclass

from marft_jax.errors import BadInput
from marft_jax.settings.setting import Section


@dataclass(frozen=True)
class Node(Section):
    """An act of a step."""

    id: str
    """Name of the node in `edges`."""
    role: str
    """Name of the agent that acts. An agent may act at several nodes."""
    message: str = ""
    """Text that the agent is shown besides the task."""


class Graph(NamedTuple):
    """Nodes and their dependencies: an edge (a, b) means that b sees the action of a."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()

    def layers(self) -> list[list[Node]]:
        """Groups nodes into layers: a node comes after all its sources, in the order of ``nodes``.

        Raises:
            graphlib.CycleError: the graph has a cycle; the second argument lists its ids.
        """
        order = graphlib.TopologicalSorter({n.id: self._sources(n.id) for n in self.nodes})
        order.prepare()
        layers: list[list[Node]] = []
        while order.is_active():
            ready = order.get_ready()
            layers.append([node for node in self.nodes if node.id in ready])
            order.done(*ready)
        return layers

    def ancestors(self, node: Node) -> set[str]:
        """Returns the ids of all nodes on which ``node`` depends, directly or indirectly."""
        ancestors: set[str] = set()
        open_ids = [node.id]
        while open_ids:
            fresh = self._sources(open_ids.pop()) - ancestors
            ancestors |= fresh
            open_ids += fresh
        return ancestors

    def _sources(self, id: str) -> set[str]:
        return {a for a, b in self.edges if b == id}


def check_graph(graph: Graph, roles: Sequence[str], source: str) -> None:
    """Checks a graph against the roles of its team.

    Raises:
        BadInput: there is no node, an id is used twice, a role or an end of an edge is unknown, or
            the graph has a cycle.
    """
    ids = [node.id for node in graph.nodes]
    if not ids:
        raise BadInput(f"{source}: expected nodes of the dag, got none; list them under `nodes:`")
    for i, node in enumerate(graph.nodes):
        if node.id in ids[:i]:
            raise BadInput(f"{source}: nodes: expected distinct ids, got {node.id!r} twice")
        if node.role not in roles:
            raise BadInput(
                f"{source}: node {node.id!r}: expected a role of {', '.join(roles)}, "
                f"got {node.role!r}"
            )
    for edge in graph.edges:
        if unknown := [id for id in edge if id not in ids]:
            raise BadInput(
                f"{source}: edge {list(edge)}: unknown node {unknown[0]!r}; known are "
                f"{', '.join(ids)}"
            )
    try:
        graph.layers()
    except graphlib.CycleError as error:
        cycle = ", ".join(id for id in ids if id in error.args[1])
        raise BadInput(f"{source}: edges: expected no cycle, got one through {cycle}") from None
