"""An environment with options of its own: the remainder of a sum, some reward for any digit.

python -m marft_jax.train --env.name remainder:Remainder --env.options modulus=3 any_digit=0.2
"""

from marft_jax.types import StepResult


class Remainder:
    def __init__(self, modulus=2, any_digit=0.1):
        self.modulus, self.any_digit = modulus, any_digit

    def reset(self, seed):
        self.a, self.b = seed % 10, seed // 10 % 10
        return f"{self.a}+{self.b} modulo {self.modulus}=?"

    def step(self, turns):
        right = str((self.a + self.b) % self.modulus)
        said = [turn.text.strip()[-1:] for turn in turns if turn.answers]
        scores = [1.0 if end == right else self.any_digit * end.isdigit() for end in said]
        return StepResult("", sum(scores) / len(scores), done=True, info={"reference": right})
