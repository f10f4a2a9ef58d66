"""Adapters on routed experts arrive in each server's own spelling, or are refused at the start."""

from __future__ import annotations

import re

import bounds
import proxied
import pytest
import small
from stand_in import LONGEST, StandIn
from test_arrival import open_http, play, requests, sampled_base

from marft_jax.errors import BadInput
from marft_jax.models import config_json

CONFIG = config_json.read_config(
    dict(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=264, hidden_size=32,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "config.json",
)  # fmt: skip
TARGETS = (*small.QV, "experts")


def moe_base():
    loaded = small.base(1, CONFIG)
    return sampled_base(loaded, "tiny", (small.RANK, small.ALPHA, TARGETS), 256, LONGEST)


@pytest.fixture(scope="module")
def standing():
    with StandIn(config=CONFIG, targets=TARGETS) as one:
        yield one


@pytest.mark.parametrize(
    ("kind", "each"), [("vllm", True), ("vllm", False), ("sglang", True)], ids=str
)
@pytest.mark.release
def test_experts_arrive_in_the_spelling_that_the_server_reads(kind, each, standing, tmp_path):
    standing.kind, standing.each_expert = kind, each
    base, sampler = moe_base(), open_http(tmp_path, standing.url, base=moe_base())
    assert sampler.servers[0].spelling == ("each" if each else "")
    for k in (1, 2):
        play(sampler, base, k, requests(8))
        gap = max(sampler.stats()[f"sampler/gap/{name}"] for name in base.adapters)
        assert gap < bounds.logprobs(CONFIG)
    sampler.release()


def refused(url, folder):
    with pytest.raises(BadInput) as error:
        open_http(folder / "run", url, base=moe_base())
    assert [*(folder / "run" / "adapters").iterdir()] == []
    return str(error.value)


def test_a_server_that_leaves_experts_out_is_refused(standing, tmp_path):
    standing.kind, standing.each_expert = "sglang", False
    assert "an adapter that it loaded does not all it should" in refused(standing.url, tmp_path)


@pytest.mark.parametrize("word", ["experts.3.", "gate_proj", "up_proj", "down_proj"])
def test_one_expert_or_one_of_its_matrices_that_is_left_out_is_noticed(word, standing, tmp_path):
    standing.kind, standing.each_expert = "vllm", True
    with proxied.Proxy(standing.url, tmp_path) as proxy:
        proxy.fault = proxied.changed_files(proxied.without(word))
        assert "does not all it should" in refused(proxy.url, tmp_path)


def test_experts_in_another_order_are_noticed(standing, tmp_path):
    def reversed_experts(tensors, known):
        swap = lambda name: re.sub(r"experts\.(\d)", lambda m: f"experts.{3 - int(m[1])}", name)  # noqa: E731
        return {name: tensors[swap(name)] for name in tensors}

    standing.kind, standing.each_expert = "vllm", True
    with proxied.Proxy(standing.url, tmp_path) as proxy:
        proxy.fault = proxied.changed_files(reversed_experts)
        assert "does not all it should" in refused(proxy.url, tmp_path)


def test_a_server_that_reads_no_spelling_says_why_for_each(standing, tmp_path):
    standing.kind, standing.each_expert = "vllm", None
    said = refused(standing.url, tmp_path)
    assert "it does not load an adapter: status 500" in said
    assert re.search("experts.0.down_proj.*; status 500: .*experts.base", said)


def test_two_servers_each_get_their_own_spelling(standing, tmp_path):
    standing.kind, standing.each_expert = "vllm", True
    with StandIn(config=CONFIG, targets=TARGETS) as second:
        sampler, base = open_http(tmp_path, standing.url, second.url, base=moe_base()), moe_base()
        assert [server.spelling for server in sampler.servers] == ["each", ""]
        play(sampler, base, 1, requests(16))
        [first, other] = (tmp_path / "adapters").iterdir()
        assert {x.name for x in first.iterdir()} == {x.name for x in other.iterdir()}
        sampler.release()
    assert not [*(tmp_path / "adapters").iterdir()]
