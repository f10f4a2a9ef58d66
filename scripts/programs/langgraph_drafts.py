"""A LangGraph graph: two drafts side by side, then a solver, asked again while it has no number.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name langgraph_drafts:play --run.dir runs/langgraph
"""

import asyncio
import operator
import os
import random
import re
from typing import Annotated, TypedDict

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import DefaultAsyncHttpxClient


class State(TypedDict):
    question: str
    drafts: Annotated[list[str], operator.add]
    talk: Annotated[list, operator.add]


def make_graph(planner: ChatOpenAI, solver: ChatOpenAI):
    async def draft(question: str) -> dict:
        await asyncio.sleep(random.random() * float(os.environ.get("DELAY", "0")))
        return {"drafts": [(await planner.ainvoke([HumanMessage(question)])).content]}

    async def first(state: State) -> dict:
        return await draft(state["question"])

    async def turned(state: State) -> dict:
        return await draft("+".join(reversed(state["question"][:-2].split("+"))) + "=?")

    async def solve(state: State) -> dict:
        draft = next((draft for draft in state["drafts"] if "=" in draft), state["drafts"][0])
        shown = f"{state['question']}\nplanner: {draft}"
        asked = HumanMessage("again" if state["talk"] else shown)
        reply = await solver.ainvoke([*state["talk"], asked])
        return {"talk": [asked, AIMessage(reply.content)]}

    def judge(state: State) -> str:
        answered = re.search(r"\d", state["talk"][-1].content)
        return END if answered or len(state["talk"]) > 4 else "solve"

    graph = StateGraph(State).add_node(first).add_node(turned).add_node(solve)
    graph.add_edge(START, "first").add_edge(START, "turned").add_edge(["first", "turned"], "solve")
    return graph.add_conditional_edges("solve", judge).compile()


async def play(task: int, client) -> float:
    digits = [task // 10**i % 10 for i in range(3)]
    asked = {"question": "+".join(map(str, digits)) + "=?", "drafts": [], "talk": []}
    async with DefaultAsyncHttpxClient() as http:  # which ends with this episode's event loop
        where = {"base_url": client.base_url, "api_key": client.api_key, "http_async_client": http}
        models = [ChatOpenAI(model=agent, **where) for agent in ("planner", "solver")]
        state = await make_graph(*models).ainvoke(asked)
    return float(re.findall(r"\d+", state["talk"][-1].content)[-1:] == [str(sum(digits))])
