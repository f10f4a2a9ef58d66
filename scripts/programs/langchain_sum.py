"""LangChain's structured output, and an agent of LangChain with a tool and a type of its answer.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name langchain_sum:play --team.max_new_tokens 60 --model.context 800 \
    --run.dir runs/langchain
"""

from typing import Annotated

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import DefaultAsyncHttpxClient
from pydantic import BaseModel, Field


class Sum(BaseModel):
    """The sum of two digits."""

    total: int = Field(ge=0, le=18)


Digit = Annotated[int, Field(ge=0, le=9)]  # an untrained model may write digits without an end


def add(a: Digit, b: Digit) -> int:
    """Adds two numbers."""
    return a + b


async def play(task: int, client) -> float:
    a, b = task % 10, task // 10 % 10
    async with DefaultAsyncHttpxClient() as http:  # which ends with this episode's event loop
        where = {"base_url": client.base_url, "api_key": client.api_key, "http_async_client": http}
        draft = ChatOpenAI(model="planner", **where).with_structured_output(Sum)
        guess = await draft.ainvoke(f"{a}+{b}=?")
        agent = create_agent(
            ChatOpenAI(model="solver", **where), tools=[add], response_format=ToolStrategy(Sum)
        )
        question = {"role": "user", "content": f"{a}+{b}=? perhaps {guess.total}"}
        try:
            reply = await agent.ainvoke({"messages": [question]}, {"recursion_limit": 8})
        except GraphRecursionError:  # it calls `add` again and again
            return 0.0
    answer = reply.get("structured_response")  # None: its last call was cut off
    return float(answer is not None and answer.total == a + b)
