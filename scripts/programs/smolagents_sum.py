"""An agent of smolagents that must call a tool in each step: one of its own, or the final answer.

cd scripts/programs && python -m marft_jax.train --team.workflow program \
    --env.name smolagents_sum:play --model.base ../../models/SmolLM2-135M-Instruct.Q4_1.gguf \
    --team.max_new_tokens 60 --model.context 4000 --run.dir runs/smolagents
"""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: a number.
        b: another number.
    """
    return a + b


def play(task: int, client) -> float:
    a, b = task % 10, task // 10 % 10
    model = OpenAIModel("solver", api_base=client.base_url, api_key=client.api_key)
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
    return float(str(agent.run(f"{a}+{b}=?")) == str(a + b))
