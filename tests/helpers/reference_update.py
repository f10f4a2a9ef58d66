"""A whole training step from the definitions, in NumPy: what the learner is compared with.

One turn stands in one row, nothing is packed, cut or shared, and sums run over Python loops in
double precision. Of the package it uses the decoder's forward pass and its transpose alone: credit,
advantages, losses with their derivatives, clipping and Adam are written here a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import small

from marft_jax.models import decoder, lora
from marft_jax.settings.config import Algo, Config
from marft_jax.types import Episode, Turn

ROWS, WIDTH = 64, 32  # room for the turns of a batch, and for prompt and action of one


# Credit and advantages.


def credited(episode: Episode, algo: Algo, step_reward: Any = None) -> list[float]:
    """The reward of each turn."""

    def shaped(reward: float, bias: float) -> float:
        value = (reward + bias) * algo.reward_scale
        limit = np.inf if algo.reward_clip is None else algo.reward_clip
        return min(max(value, -limit), limit)

    rewards = [0.0] * len(episode.turns)
    for step, result in enumerate(episode.results):
        turns = [k for k, turn in enumerate(episode.turns) if turn.step == step]
        for behind, k in enumerate(reversed(turns)):
            if algo.credit == "per_step":
                own = step_reward(episode.turns[k], result.reward, episode)
                rewards[k] += shaped(own, algo.reward_bias)
            elif algo.credit == "step_discount":
                weight = algo.credit_discount**behind
                rewards[k] += weight * shaped(result.reward, algo.reward_bias)
            elif behind == 0:
                rewards[k] += shaped(result.reward, algo.reward_bias)
        for name, reward in result.agent_rewards.items():
            [*_, k] = [k for k in turns if episode.turns[k].name == name]
            rewards[k] += shaped(reward, 0.0)
    return rewards


class Decision(NamedTuple):
    """A turn (action level) or a token (token level), in acting order."""

    episode: int
    task: int
    agent: int
    place: tuple[int, int, int]  # task, agent, the agent's n-th turn
    turn: int  # among all turns of the batch
    reward: float
    weight: float  # 1 / the decisions of its turn


def decisions(
    episodes: Sequence[Episode], rewards: Sequence[Sequence[float]], level: str
) -> list[Decision]:
    found, turn = [], 0
    for e, episode in enumerate(episodes):
        acted = {}
        for k, t in enumerate(episode.turns):
            acted[t.agent] = acted.get(t.agent, 0) + 1
            place, size = (episode.index, t.agent, acted[t.agent]), len(t.action)
            for left in reversed(range(1 if level == "action" else size)):
                reward = rewards[e][k] if left == 0 else 0.0
                weight = 1.0 if level == "action" else 1 / size
                found.append(Decision(e, episode.index, t.agent, place, turn, reward, weight))
            turn += 1
    return found


def discounted(ds: Sequence[Decision], values: np.ndarray, gamma: float, gae_lambda: float):
    """Generalised advantages, through the decisions of an episode."""
    advantages = np.zeros(len(ds))
    for x in reversed(range(len(ds))):
        goes_on = x + 1 < len(ds) and ds[x + 1].episode == ds[x].episode
        following = (values[x + 1], advantages[x + 1]) if goes_on else (0.0, 0.0)
        delta = ds[x].reward + gamma * following[0] - values[x]
        advantages[x] = delta + gamma * gae_lambda * following[1]
    return advantages


def gae(rewards_EJ, values_EJ, next_values_EJ, discounts_EJ, gae_lambda: float):
    """Along a chain (Schulman et al. 2015, equation 16): (advantages, returns), where a discount is
    0 if the episode ends there."""
    deltas_EJ = rewards_EJ + discounts_EJ * next_values_EJ - values_EJ
    advantages_EJ, ahead_E = np.zeros(deltas_EJ.shape), np.zeros(len(deltas_EJ))
    for j in reversed(range(deltas_EJ.shape[1])):
        ahead_E = deltas_EJ[:, j] + discounts_EJ[:, j] * gae_lambda * ahead_E
        advantages_EJ[:, j] = ahead_E
    return advantages_EJ, advantages_EJ + values_EJ


def compared(ds: Sequence[Decision], returns: np.ndarray) -> np.ndarray:
    """Returns minus the mean of the turns of the same place; of one alone, of its whole task."""
    out = np.zeros(len(ds))
    for x, d in enumerate(ds):
        like = [y for y, other in enumerate(ds) if other.place == d.place]
        samples = {other.episode for other in ds if other.task == d.task}
        if len({ds[y].episode for y in like}) > 1:
            out[x] = returns[x] - _mean(returns, ds, like)
        elif len(samples) > 1:
            own = [[y for y, other in enumerate(ds) if other.episode == e] for e in samples]
            out[x] = returns[x] - np.mean([_mean(returns, ds, of_one) for of_one in own])
    return out


def _mean(x: np.ndarray, ds: Sequence[Decision], of: Sequence[int]) -> float:
    weights = np.array([ds[y].weight for y in of])
    return float((x[of] * weights).sum() / weights.sum())


def sets(ds: Sequence[Decision], how: str) -> list[list[list[int]]]:
    """For each decision, what it is normalised with: parts that weigh the same."""
    out = []
    for d in ds:
        of_place = [y for y, other in enumerate(ds) if other.place == d.place]
        alone = how == "group_turn" and len({ds[y].episode for y in of_place}) == 1
        if how == "group" or alone:
            samples = sorted({other.episode for other in ds if other.task == d.task})
            out.append([[y for y, other in enumerate(ds) if other.episode == e] for e in samples])
        else:
            label = {"batch": (), "agent": ("agent",), "group_turn": ("place",)}[how]
            alike = [all(getattr(o, x) == getattr(d, x) for x in label) for o in ds]
            out.append([np.flatnonzero(alike).tolist()])
    return out


def normalized(
    advantages: np.ndarray, ds: Sequence[Decision], how: str, *, shift: bool
) -> np.ndarray:
    """Deviation 1, and mean 0 where they are shifted; 0 where all are the same.

    Shifted ones shrink where those of a place (an agent's n-th turn) differ more than what was
    earned there.
    """
    if how == "none":
        return advantages
    out, returns = np.zeros(len(ds)), discounted(ds, np.zeros(len(ds)), 1.0, 1.0)
    for x, parts in enumerate(sets(ds, how)):
        mean = np.mean([_mean(advantages, ds, part) for part in parts]) if shift else 0.0
        squares = (advantages - mean) ** 2
        deviation = np.sqrt(np.mean([_mean(squares, ds, part) for part in parts]))
        change = advantages[x] - mean
        out[x] = 0.0 if deviation < 1e-9 else change / (deviation + 1e-8)
        if shift:
            among = {
                y: ds[y].weight / sum(ds[z].weight for z in part) for part in parts for y in part
            }
            spread, earned = (_around_places(z, ds, among) for z in (advantages, returns))
            out[x] *= min(1.0, earned / spread) if earned > 1e-9 else 0.0
    return out


def _around_places(x: np.ndarray, ds: Sequence[Decision], weights: dict[int, float]) -> float:
    """The deviation of x around the mean of each agent's n-th turn."""
    total = 0.0
    for y, weight in weights.items():
        own = {z: w for z, w in weights.items() if ds[z].place[1:] == ds[y].place[1:]}
        mean = sum(x[z] * w for z, w in own.items()) / sum(own.values())
        total += weight * (x[y] - mean) ** 2
    return float(np.sqrt(total / sum(weights.values())))


def learned_from(
    ds: Sequence[Decision], algo: Algo, values: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of every decision, of an algorithm with these settings."""
    if values is not None:
        advantages = discounted(ds, values, algo.gamma, algo.gae_lambda)
        return normalized(advantages, ds, algo.normalize, shift=True), advantages + values
    returns = discounted(ds, np.zeros(len(ds)), 1.0, 1.0)
    differences = compared(ds, returns)
    differences[np.abs(differences) < 1e-9] = 0
    return normalized(differences, ds, algo.normalize, shift=False), returns


# The model: one turn to a row.


@functools.cache
def _forward(layers: int):
    model = small.base(layers)

    def hidden(adapters, tokens_BT, lengths_B, owners_B):
        b, t = tokens_BT.shape
        positions_BT = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
        until_BT = jnp.maximum(positions_BT, lengths_B[:, None] - 1)
        fused = mask = None
        if adapters is not None:
            fused = lora.fuse(adapters, lora.scale_of(adapters, small.ALPHA), jnp.float32)
            mask = lora.owner_mask(jnp.broadcast_to(owners_B[:, None], (b, t)), fused)
        return decoder.forward(
            model.graphdef, model.params, tokens_BT, positions_BT, until_BT, fused, mask
        )[0]

    def score(adapters, tokens_BT, lengths_B, owners_B, temperature_B):
        """Log-prob of each token from the second one on, and the entropy it was drawn from."""
        hidden_BTD = hidden(adapters, tokens_BT, lengths_B, owners_B)
        logits = decoder.project(model.graphdef, model.params, hidden_BTD)
        logprobs = jax.nn.log_softmax(logits / temperature_B[:, None, None])[:, :-1]
        taken = jnp.take_along_axis(logprobs, tokens_BT[:, 1:, None], -1)[..., 0]
        return taken, -jnp.sum(jnp.exp(logprobs) * logprobs, -1)

    def gradient(adapters, tokens_BT, lengths_B, owners_B, temperature_B, slopes):
        def of(adapters):
            return score(adapters, tokens_BT, lengths_B, owners_B, temperature_B)

        return jax.vjp(of, adapters)[1](slopes)[0]

    return jax.jit(hidden), jax.jit(score), jax.jit(gradient)


class Model:
    """The turns of a batch as rows, and what the decoder makes of them."""

    def __init__(self, turns: Sequence[Turn], layers: int):
        self.turns, (self._hidden, self._score, self._gradient) = turns, _forward(layers)
        tokens, lengths = np.zeros((ROWS, WIDTH), np.int32), np.ones(ROWS, np.int32)
        owners, heat = np.zeros(ROWS, np.int32), np.ones(ROWS, np.float32)
        for row, t in enumerate(turns):
            whole = np.concatenate([t.prompt, t.action])
            tokens[row, : len(whole)], lengths[row] = whole, len(whole)
            owners[row], heat[row] = t.agent, t.temperature
        self._rows = tokens, lengths, owners
        self._heat = heat

    def _spans(self):
        for row, t in enumerate(self.turns):
            start = len(t.prompt) - 1
            yield row, slice(start, start + len(t.action))

    def scores(self, adapters) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(log-probs, entropies) of the action tokens of each turn."""
        both = self._score(adapters, *self._rows, self._heat)
        logprobs, entropies = (np.asarray(x, np.float64) for x in both)
        spans = list(self._spans())
        return [logprobs[at] for at in spans], [entropies[at] for at in spans]

    def gradient(self, adapters, d_logprobs, d_entropies):
        """The loss's gradient in the adapters, given its derivatives in the scores."""
        slopes = [np.zeros((ROWS, WIDTH - 1), np.float32) for _ in range(2)]
        for i, at in enumerate(self._spans()):
            slopes[0][at], slopes[1][at] = d_logprobs[i], d_entropies[i]
        found = self._gradient(adapters, *self._rows, self._heat, tuple(slopes))
        return jax.tree.map(lambda g: np.asarray(g, np.float64), found)

    def features(self, level: str) -> np.ndarray:
        """What the value head reads of each decision: the base's state before it."""
        states = np.asarray(self._hidden(None, *self._rows), np.float64)
        spans = list(self._spans())
        if level == "action":
            return np.stack([states[row, span.start] for row, span in spans])
        return np.concatenate([states[at] for at in spans])


# Losses: derivatives per decision.


def policy_slopes(name: str, algo: Algo, new: np.ndarray, old: np.ndarray, a: np.ndarray):
    """d loss / d log-prob of each decision."""
    if name == "reinforce":
        return -a
    high = algo.clip if algo.clip_high is None else algo.clip_high
    ratio = np.exp(new - old)
    best = -ratio * a >= -np.clip(ratio, 1 - algo.clip, 1 + high) * a
    slope = np.where(best, -ratio * a, 0.0)
    if algo.dual_clip is not None:
        slope = np.where((a < 0) & (-ratio * a > -algo.dual_clip * a), 0.0, slope)
    return slope


def value_slopes(algo: Algo, values: np.ndarray, old: np.ndarray, returns: np.ndarray):
    """d loss / d value of each decision."""
    delta = np.inf if algo.huber_delta is None else algo.huber_delta

    def error(v: np.ndarray) -> np.ndarray:
        e = np.abs(returns - v)
        return np.where(e <= delta, e**2 / 2, delta * e - delta**2 / 2 if delta < np.inf else 0)

    near = old + np.clip(values - old, -algo.value_clip, algo.value_clip)
    slope = -np.clip(returns - values, -delta, delta)
    inside = np.abs(values - old) <= algo.value_clip  # there both are one, but for rounding
    return np.where(inside | (error(values) >= error(near)), slope, 0.0)


# The optimiser.


class Adam:
    """Adam after clipping by the norm of all its gradients; eps 1e-5, no weight decay."""

    def __init__(self, params: Sequence[np.ndarray], lr: float, max_norm: float):
        self.params = [np.asarray(p, np.float64) for p in params]
        self.mean = [np.zeros_like(p) for p in self.params]
        self.square = [np.zeros_like(p) for p in self.params]
        self.count, self._lr, self._max_norm = 0, lr, max_norm

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        if 0 < self._max_norm < norm:
            gradients = [g * self._max_norm / norm for g in gradients]
        self.count += 1
        for i, g in enumerate(gradients):
            self.mean[i] = 0.9 * self.mean[i] + 0.1 * g
            self.square[i] = 0.999 * self.square[i] + 0.001 * g**2
            mean = self.mean[i] / (1 - 0.9**self.count)
            square = self.square[i] / (1 - 0.999**self.count)
            self.params[i] = self.params[i] - self._lr * mean / (np.sqrt(square) + 1e-5)


class Update(NamedTuple):
    """An optimiser for each adapter and one for the value head, after the step."""

    adapters: list[Adam]
    head: Adam


def update(
    name: str, config: Config, episodes: Sequence[Episode], adapters: lora.Adapters,
    head: Sequence[np.ndarray],
) -> Update:  # fmt: skip
    """One training step: all epochs, one minibatch in each, for a learner's settings."""
    algo, layers = config.algo, adapters["q"]["a"].shape[1]
    level = "token" if name in ("tppo", "grpo") else "action"
    turns = [t for e in episodes for t in e.turns]
    model, behaviour = Model(turns, layers), [np.asarray(t.logprobs, float) for t in turns]
    base, _ = model.scores(jax.tree.map(jnp.zeros_like, adapters))
    ds = decisions(episodes, [credited(e, algo) for e in episodes], level)
    if algo.kl_coef and algo.kl_in == "reward":  # k1
        penalties = [b - r for b, r in zip(behaviour, base, strict=True)]
        kl = _per_decision(penalties, level, [1] * len(turns))
        ds = [d._replace(reward=d.reward - algo.kl_coef * x) for d, x in zip(ds, kl, strict=True)]
    lengths = [len(t.action) for t in turns]
    divisors = {
        "sum": [1] * len(turns),
        "token": lengths,
        "word": [max(1, len(t.text.split())) for t in turns],
    }[algo.ratio]
    has_critic = config.critic is not None
    critic = Adam(head, config.critic.lr if has_critic else 0.0, algo.max_grad_norm)
    features = model.features(level) if has_critic else None
    old_values, scale = None, 1.0
    if has_critic:  # it learns returns divided by the largest of the first step
        scale = np.abs(discounted(ds, np.zeros(len(ds)), 1.0, 1.0)).max()
        old_values = _values(critic.params, features)[0] * scale
    advantages, returns = learned_from(ds, algo, old_values)
    owners = np.array([d.agent for d in ds])
    own = [
        Adam([leaf[n] for leaf in jax.tree.leaves(adapters)], algo.lr, algo.max_grad_norm)
        for n in range(len(adapters["q"]["a"]))
    ]
    for _ in range(algo.epochs):
        policy = _stacked(own, adapters)
        logprobs, _ = model.scores(policy)
        new, old = (_per_decision(x, level, divisors) for x in (logprobs, behaviour))
        slopes = policy_slopes(name, algo, new, old, advantages)
        share = 1 / np.bincount(owners)[owners]
        d_logprobs = _per_token(slopes * share, ds, turns, level, divisors)
        d_entropies = _per_token(-algo.entropy_coef * share, ds, turns, level, lengths)
        if algo.kl_coef and algo.kl_in == "loss":  # k3
            weights = _per_token(algo.kl_coef * share, ds, turns, level, lengths)
            for i, (lp, r) in enumerate(zip(logprobs, base, strict=True)):
                d_logprobs[i] = d_logprobs[i] + weights[i] * (1 - np.exp(r - lp))
        leaves = jax.tree.leaves(model.gradient(policy, d_logprobs, d_entropies))
        for n, adam in enumerate(own):
            if np.any(advantages[owners == n]):
                adam.step([leaf[n] for leaf in leaves])
        if has_critic:
            values, states = _values(critic.params, features)
            slope = value_slopes(algo, values, old_values / scale, returns / scale) / len(ds)
            critic.step(_value_gradients(critic.params, states, slope))
    return Update(own, critic)


def _per_decision(tokens: Sequence[np.ndarray], level: str, divisors: Sequence[int]) -> np.ndarray:
    if level == "token":
        return np.concatenate(tokens)
    return np.array([x.sum() / n for x, n in zip(tokens, divisors, strict=True)])


def _per_token(x, ds, turns, level: str, divisors: Sequence[int]) -> list[np.ndarray]:
    """The transpose of ``_per_decision``."""
    if level == "token":
        return [x[[d.turn == k for d in ds]] for k in range(len(turns))]
    return [np.full(len(t.action), x[k] / divisors[k]) for k, t in enumerate(turns)]


def _stacked(own: Sequence[Adam], like: lora.Adapters) -> lora.Adapters:
    leaves = [np.stack(x).astype(np.float32) for x in zip(*(a.params for a in own), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _values(kernels: Sequence[np.ndarray], features: np.ndarray):
    """(values, inputs of each layer) of a bias-free MLP with ReLU."""
    states = [features]
    for kernel in kernels[:-1]:
        states.append(np.maximum(states[-1] @ kernel, 0))
    return (states[-1] @ kernels[-1])[:, 0], states


def _value_gradients(kernels: Sequence[np.ndarray], states: Sequence[np.ndarray], slope):
    back, gradients = slope[:, None], []
    for kernel, state in zip(reversed(kernels), reversed(states), strict=True):
        gradients.insert(0, state.T @ back)
        back = (back @ kernel.T) * (state > 0)
    return gradients
