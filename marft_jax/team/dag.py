"""A directed acyclic graph of acts: the dependency function D of a ``dag`` team, before it acts."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from typing import NamedTuple

from marft_jax.errors import BadInput


class Node(NamedTuple):
    """An act of a step."""

    id: str  # its name in ``edges``
    role: str  # the name of the agent that acts here; one may act at several nodes
    message: str = ""  # shown to it besides the task


class Graph(NamedTuple):
    """Nodes, and which depend on which: an edge (a, b) says that b is shown what a wrote."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()

    def layers(self) -> list[list[Node]]:
        """Nodes whose sources have all acted, layer by layer, each in the order of ``nodes``.

        Raises:
            graphlib.CycleError: its second argument lists the ids of a cycle.
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
        """Returns the ids of all nodes that ``node`` depends on, directly or through others."""
        found: set[str] = set()
        open_ids = [node.id]
        while open_ids:
            fresh = self._sources(open_ids.pop()) - found
            found |= fresh
            open_ids += fresh
        return found

    def _sources(self, id: str) -> set[str]:
        return {a for a, b in self.edges if b == id}


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
    except graphlib.CycleError as error:
        cycle = ", ".join(id for id in ids if id in error.args[1])
        raise BadInput(f"{source}: edges: expected no cycle, got one through {cycle}") from None
