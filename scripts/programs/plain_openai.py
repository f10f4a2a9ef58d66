"""Plain asyncio and an OpenAI client: two drafts side by side, then an answer.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name plain_openai:play --run.dir runs/plain_openai
"""

import asyncio
import os
import random
import re

from openai import AsyncOpenAI


async def solve(question: str, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(agent: str, text: str) -> str:
            await asyncio.sleep(random.random() * float(os.environ.get("DELAY", "0")))
            messages = [{"role": "user", "content": text}]
            reply = await client.chat.completions.create(model=agent, messages=messages)
            return reply.choices[0].message.content

        turned = "+".join(reversed(question.removesuffix("=?").split("+"))) + "=?"
        drafts = await asyncio.gather(ask("planner", question), ask("planner", turned))
        return await ask("solver", "\n".join([question, *(f"planner: {d}" for d in drafts)]))


async def play(task: int, client) -> float:
    digits = [task // 10**i % 10 for i in range(3)]
    answer = await solve("+".join(map(str, digits)) + "=?", client.base_url, client.api_key)
    return float(re.findall(r"\d+", answer)[-1:] == [str(sum(digits))])
