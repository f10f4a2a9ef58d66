"""The values that travel between rooms, and the dimension legend.

Array names end in one capital letter per dimension:

    A  action tokens of a row      J  links of a chain    S  cache slots
    B  rows                        K  turns               T  tokens
    C  channels of a head          L  layers              U  microbatches
    D  model width                 M  stacked members     V  vocabulary
    E  episodes                    N  adapters            X  decisions: K or A
    F  MLP width                   P  agents (profiles)   Y  layers of turns, by D
    G  key-value heads             R  LoRA rank           Z  cells: sets of decisions
    H  query heads

So ``logprobs_BA`` holds one number per action token of each row, and ``lora_a_NLDR`` a rank-R
factor per adapter and layer. Pytrees carry no suffix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import jax


Level = Literal["action", "token"]
"""Where a decision lives: a turn, or each token of its action."""


class Sampling(NamedTuple):
    """Settings of sampling. Every field may differ from row to row of a batch."""

    max_new_tokens: int  # the longest action, in tokens, the end-of-turn token included
    temperature: float = 1.0  # divides the logits; 0 is greedy (the most likely token)
    top_p: float = 1.0  # of what top_k keeps, the smallest set whose share reaches this
    top_k: int = 0  # keep this many most likely tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0 keeps all
    stop: tuple[str, ...] = ()  # texts that end an action


class Act(NamedTuple):
    """A workflow's request that an agent acts: what it is shown, and how it samples."""

    agent: int  # index of the agent in its team
    prompt: np.ndarray  # the token ids that the agent is shown
    step: int  # the step of the episode in which it acts
    sees: tuple[int, ...]  # indices of the earlier turns that the prompt shows; row i of D
    sampling: Sampling
    start: int = 0  # this many of the prompt's tokens come, id by id, from the turns it sees
    number: int | None = None  # of its random stream; None for its place among the episode's acts
    choices: tuple[tuple[int, ...], ...] = ()  # ids of the actions it may take; () for any
    form: str = ""  # form that its text follows, see ``sampling.Request``; "" for any text


class AnsweredCall(NamedTuple):
    """A call of a tool in a turn, with its answer."""

    name: str  # of the tool
    arguments: str  # a JSON object as text
    answer: str  # shown to the agent
    # ok; wrong: unknown tool, or arguments that do not fit; failed: the tool's own fault
    verdict: str
    seconds: float = 0.0  # that the tool took
    cost: float = 0.0  # subtracted from the reward of the turn


class Turn(NamedTuple):
    """A turn: an agent acted once."""

    agent: int  # index of the agent in its team
    name: str  # the agent's name
    step: int  # the step of the episode, from 0
    prompt: np.ndarray  # ids the agent was shown, ``int32 [prompt tokens]``
    action: np.ndarray  # ids it wrote, exactly as sampled, ``int32 [action tokens]``
    logprobs: np.ndarray  # behaviour log-prob of each action token at ``temperature``, ``float32``
    text: str  # the action as text, without the end-of-turn token or the stop text
    answers: bool  # this agent's actions are graded
    sees: tuple[int, ...]  # indices of the episode's earlier turns that the prompt showed
    truncated: bool  # the action stopped at its token limit, not at its end or a stop text
    temperature: float  # of sampling; 1 for a greedy turn, whose log-probs are unscaled
    index: int = 0  # number of the turn in its episode, from 0
    start: int = 0  # this many prompt tokens come from earlier turns; the rest is new text
    limit: int | None = None  # the most tokens of the action; None where it was not sampled
    filtered_mass: float | None = None  # probability that filters left to draw from, mean
    # the answer of the tool that it called, after which the same agent went on in the next turn
    tool: str | None = None
    calls: tuple[AnsweredCall, ...] = ()  # of the agent's own tools, whose answers ``tool`` joins
    replayed: bool = False  # of another sample, whose branch this episode is; learned from there
    player: str = ""  # whose reward it earns; "" is the whole team
    version: str = ""  # of the adapters that sampled it, see ``sampling.version_of``
    # what its tokens were drawn among, as of ``Act``; the update learns under the same mask
    choices: tuple[tuple[int, ...], ...] = ()
    form: str = ""

    def __repr__(self) -> str:
        return f"Turn({self.name}: {self.text!r:.200})"


THINKING = re.compile(r"(?s)<think>.*?(?:</think>|\Z)\s*|\A(?:(?!<think>).)*?</think>\s*")
"""A model's thinking; the second form where the prompt opened it."""


def without_thinking(text: str) -> str:
    """What others are shown of an agent's text: all but what it thought.

    >>> without_thinking("<think>3+4 is 7.</think> The answer is 7.")
    'The answer is 7.'
    """
    return THINKING.sub("", text) if "think>" in text else text


def thinking_in(text: str) -> str:
    """What an agent thought in its text, without the marks.

    >>> thinking_in("<think>3+4 is 7.</think> The answer is 7.")
    '3+4 is 7.'
    """
    thoughts = (part[0] for part in THINKING.finditer(text if "think>" in text else ""))
    return "".join(re.sub("</?think>", "", part) for part in thoughts).strip()


class StepResult(NamedTuple):
    """The environment's answer to a step of the team."""

    observation: str  # the state text that the agents see in the next step
    reward: float  # the team's reward for this step, every player's in a game; any float
    done: bool  # the episode is over
    info: Mapping[str, Any] = {}  # for the transcript: the reference answer, a verdict, ...
    # rewards meant for single agents, by name, added to their last turn of the step; in a game also
    # for players, added to their last turn so far
    agent_rewards: Mapping[str, float] = {}
    # what is new in ``observation``, for agents that still see what was before (context: shared);
    # the whole observation where it is empty
    feedback: str = ""
    snapshot: Any = None  # of an environment that can be restored; taken where branches may need it


class Sample(NamedTuple):
    """Identity of an episode."""

    index: int  # number of the task, with which its environment is reset
    group: int  # number of the group; its members have the same task and are compared
    member: int = 0  # number of the episode in its group
    branch: Branch | None = None  # where and of what it is a branch
    alone: int | None = None  # the agent that plays it alone, instead of the team


class Branch(NamedTuple):
    """Another sample of one turn of an episode, played on to the end.

    The turns before it, and those beside it that were asked for together with it, are as they were.
    A turn after the last one goes on with a trunk that has stopped.
    """

    trunk: Episode
    turn: int  # index of the turn that is sampled anew
    number: int  # of the branch at this turn, from 1
    stops: bool = False  # it ends with the answer to the step of that turn


class Episode(NamedTuple):
    """A finished episode: its turns in acting order and what the environment paid for them."""

    index: int  # these three as of ``Sample``
    group: int
    member: int
    task: str  # the first observation
    turns: Sequence[Turn]  # every turn, in acting order
    results: Sequence[StepResult]  # the environment's answer to each step
    # of a branch: the trunk's turn that is sampled anew, and the number of the branch there, from 1
    # (0: the trunk's, which another sample surpassed); of an agent alone: -1, and the agent
    branch: tuple[int, int] | None = None
    # of a trunk that grew turn by turn: what each turn earned when it was compared, before others
    # of its step were chosen
    paid: tuple[float, ...] = ()
    alone: Mapping[int, float] = {}  # what an agent earns alone on the task, where that is known

    def __repr__(self) -> str:
        return f"Episode({self.task!r:.80}: {len(self.turns)} turns, reward {self.reward:g})"

    @property
    def answer(self) -> str:
        """The team's answer: the last graded text, or the last one where none is graded."""
        graded = [turn.text for turn in self.turns if turn.answers]
        return (graded or [turn.text for turn in self.turns] or [""])[-1]

    @property
    def reward(self) -> float:
        """The episodic return, the undiscounted sum over steps: the team's, and in a game what was
        paid to all its players over the number of those that acted."""
        common = float(sum(result.reward for result in self.results))
        players = {turn.player for turn in self.turns} - {""}
        if not players:
            return common
        return common + sum(sum(r.agent_rewards.values()) for r in self.results) / len(players)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(agent, n) of each turn: the agent's n-th one, from 0."""
        acted: dict[int, int] = {}
        numbered = []
        for turn in self.turns:
            acted[turn.agent] = acted.get(turn.agent, -1) + 1
            numbered.append((turn.agent, acted[turn.agent]))
        return numbered

    @property
    def dependency(self) -> np.ndarray:
        """D: ``bool [turns, turns]``, entry (i, j) true where turn i was shown turn j."""
        seen = np.zeros((len(self.turns), len(self.turns)), bool)
        for i, turn in enumerate(self.turns):
            seen[i, list(turn.sees)] = True
        return seen


class Credit(NamedTuple):
    """Rule that pays the turns of an episode.

    Attributes:
        pay: an episode to the reward of each of its turns, ``float32 [turns]``.
        of_task: as ``pay``, by the task's reward alone: without step rewards, penalties and costs.
        by_step: each turn, a branch's too, earns its own step reward and not a share of the return.
        solo: a turn is compared with samples of its agent alone on the task.
    """

    pay: Callable[[Episode], np.ndarray]
    of_task: Callable[[Episode], np.ndarray]
    by_step: bool
    solo: bool


class FailedEpisode(NamedTuple):
    """An episode that could not be played to its end; ``why`` is one line, the rest as above."""

    index: int
    group: int
    member: int
    why: str


class Played(NamedTuple):
    """Episodes of a play, those that failed, and seconds spent waiting for environments."""

    episodes: list[Episode]
    failed: list[FailedEpisode]
    waited_s: float = 0.0


MAIN = "main"
"""Name of the base that ``--model.base`` says."""


class Version(NamedTuple):
    """Everything that a step is sampled with and that training changes."""

    adapters: dict[str, dict[str, dict[str, jax.Array]]]  # ``models.lora.Adapters`` of each base
    progress: jax.Array  # of the curriculum


class TrainedStep(NamedTuple):
    """A training step that is finished, and held to be saved."""

    step: int  # its number, from 1; after a rollback numbers come again
    metrics: Mapping[str, float]  # as in ``metrics.jsonl``
    episodes: Sequence[Episode]  # that it learned from


OnStep = Callable[[TrainedStep], bool | None]
"""Is called after each step; True ends the run there, saved, as a signal would."""


class Player(Protocol):
    """Plays episodes."""

    def play(self, samples: Sequence[Sample], step: int) -> Played: ...
