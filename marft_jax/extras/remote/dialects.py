"""How the servers of vLLM and SGLang are asked, and how they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marft_jax.types import Sampling


class Ask(NamedTuple):
    """A request to a server.

    Attributes:
        model: name of the adapter, or of the server's base.
        is_adapter: it is the name of an adapter.
        ends: ids that end the action.
    """

    model: str
    is_adapter: bool
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    ends: Sequence[int]


class Dialect(NamedTuple):
    """The routes of a kind of server, and the JSON that it takes and gives.

    Attributes:
        known_by: a route that only this kind has.
        generate: the route that samples.
        adapters: what the routes of adapters begin with.
        body: makes the JSON of a request.
        read: ids and log-probs of an answer; raises where it has another form.
        spellings: of adapters on routed experts, in the order in which they are tried.
    """

    name: str
    known_by: str
    generate: str
    adapters: str
    body: Callable[[Ask], dict[str, Any]]
    read: Callable[[Any], tuple[Sequence[Any], Sequence[Any]]]
    spellings: Sequence[str]


def _settings(ask: Ask) -> dict[str, Any]:
    """Every setting of sampling: a server's defaults are those of generation_config.json.

    A stop text that begins with white space is left to ours, which does not search the white space
    before the text.
    """
    s = ask.sampling
    return dict(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k or -1, min_p=s.min_p,
        stop=[stop for stop in s.stop if not stop[0].isspace()], stop_token_ids=[*ask.ends],
        skip_special_tokens=False,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    )  # fmt: skip


def _vllm(ask: Ask) -> dict[str, Any]:
    return dict(
        model=ask.model, prompt=[*ask.prompt], seed=ask.seed,
        max_tokens=ask.sampling.max_new_tokens, include_stop_str_in_output=True,
        # log-probs of the sampled tokens alone; ends are those of stop_token_ids
        logprobs=0, return_token_ids=True, ignore_eos=True, **_settings(ask),
    )  # fmt: skip


def _of_vllm(answer: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    [choice] = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def _sglang(ask: Ask) -> dict[str, Any]:
    settings = dict(
        max_new_tokens=ask.sampling.max_new_tokens, sampling_seed=ask.seed,
        ignore_eos=not ask.ends, **_settings(ask),  # it ignores stop_token_ids, too
    )  # fmt: skip
    asked = {"input_ids": [*ask.prompt], "sampling_params": settings}
    asked |= {"return_logprob": True, "logprob_start_len": -1}
    return asked | ({"lora_path": ask.model} if ask.is_adapter else {})


def _of_sglang(answer: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    tokens = answer["meta_info"]["output_token_logprobs"]
    return [token[1] for token in tokens], [token[0] for token in tokens]


STACKED, EACH = "", "each"
"""Tensors of all experts in one, as peft names them (``target_parameters``), or of each expert.

vLLM reads one of both, which depends on the class of its base (``is_3d_moe_weight``), and refuses
the other. SGLang reads those of each expert, and leaves out the others without a word.
"""
DIALECTS = (
    Dialect("SGLang", "/get_model_info", "/generate", "", _sglang, _of_sglang, (EACH,)),
    Dialect("vLLM", "/version", "/v1/completions", "/v1", _vllm, _of_vllm, (EACH, STACKED)),
)
