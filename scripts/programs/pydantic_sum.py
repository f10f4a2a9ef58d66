"""An agent of pydantic-ai whose answer is a value of a type: the model must call its output tool.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name pydantic_sum:play --team.max_new_tokens 40 --model.context 600 \
    --run.dir runs/pydantic
"""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    total: int = Field(ge=0, le=18)


async def play(task: int, client) -> float:
    a, b = task % 10, task // 10 % 10
    async with DefaultAsyncHttpxClient() as http:  # which ends with this episode's event loop
        own = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http)
        model = OpenAIChatModel("solver", provider=OpenAIProvider(openai_client=own))
        reply = await Agent(model, output_type=Sum).run(f"{a}+{b}=?")
    return float(reply.output.total == a + b)
