"""OpenAI's Agents SDK: a planner that may hand the task over to a solver.

A handoff is a call of a tool: the base needs a chat template with tools, such as Qwen's.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name agents_handoff:play --run.dir runs/agents_handoff --model.context 1024 \
    --model.base Qwen/Qwen2.5-0.5B-Instruct --team.max_new_tokens 64
"""

import re

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import AgentsException
from openai import AsyncOpenAI


def make_team(client: AsyncOpenAI) -> Agent:
    def agent(name: str, instructions: str, **more) -> Agent:
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        return Agent(name=name, instructions=instructions, model=model, **more)

    solver = agent("solver", "Solve the task. Write its number last.")
    return agent("planner", "Solve the task, or hand it over to the solver.", handoffs=[solver])


async def play(task: int, client) -> float:
    digits = [task // 10**i % 10 for i in range(3)]
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as own:
        try:
            question, quiet = "+".join(map(str, digits)) + "=?", RunConfig(tracing_disabled=True)
            done = await Runner.run(make_team(own), question, max_turns=4, run_config=quiet)
        except AgentsException:
            return 0.0
    return float(re.findall(r"\d+", str(done.final_output))[-1:] == [str(sum(digits))])
