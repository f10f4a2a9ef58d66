"""The public SDK against the service: training, sampling, saved weights, as in a user's loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import marft_jax

tinker = pytest.importorskip("tinker")
types = tinker.types

pytestmark = pytest.mark.slow
TEXT = list(b"4+7+8=?9182736450")
PROMPT = TEXT[:7]
ADAM = types.AdamParams(learning_rate=3e-3)


def datum(ids=TEXT, weights=None, **inputs):
    weights = np.ones(len(ids) - 1, np.float32) if weights is None else weights
    given = {"target_tokens": np.asarray(ids[1:])} | (inputs or {"weights": weights})
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


@pytest.fixture(scope="module")
def client(one_device):
    client = marft_jax.Client("tiny", {"model.context": 64}, rank=8, samplers=2)
    yield client
    client.close("success").result()


@pytest.fixture
def make(client):
    def new(rank=4, **how):
        return client.create_lora_training_client("tiny", rank=rank, seed=1, **how).result()

    return new


def step(training, data, loss="cross_entropy", config=None, adam=ADAM):
    passed = training.forward_backward(data, loss, config)
    stepped = training.optim_step(adam)
    stepped.result()
    return passed.result()


def logprobs(training, data=None):
    found = training.forward(data or [datum()], "cross_entropy").result()
    return [x["logprobs"].to_numpy() for x in found.loss_fn_outputs]


def sample(sampler, n=1, prompt=PROMPT, more=None, **params):
    given = types.SamplingParams(**({"max_tokens": 6, "temperature": 0.0} | params))
    return sampler.sample(types.ModelInput.from_ints(prompt), n, given, **(more or {})).result()


@pytest.fixture(scope="module")
def trained(client):
    """A model of all matrices beside one of attention alone, trained in the same calls."""
    hows = {"rank": 4}, {"rank": 8, "train_mlp": False}
    both = [client.create_lora_training_client("tiny", seed=1, **how) for how in hows]
    both, losses = [one.result() for one in both], []
    for _ in range(16):
        passed = [one.forward_backward([datum()], "cross_entropy") for one in both]
        stepped = [one.optim_step(ADAM) for one in both]
        losses.append([x.result().metrics["loss:sum"] / 16 for x in passed])
        _ = [x.result() for x in stepped]
    return both, losses


def test_two_clients_learn_a_text_each_bit_for_bit_as_if_alone(client, trained):
    both, losses = trained
    assert losses[0][0] > 6 and max(losses[-1]) < 0.2
    alone = client.create_lora_training_client("tiny", rank=8, seed=1, train_mlp=False).result()
    for before in losses[:4]:
        assert step(alone, [datum()]).metrics["loss:sum"] / 16 == before[1]


def test_weights_are_saved_loaded_and_sampled(client, trained):
    (first, _), _ = trained
    one = sample(first.save_weights_and_get_sampling_client().result(), 2)
    assert bytes(one.sequences[0].tokens) == b"918273" and one.sequences[0].stop_reason == "length"
    path = first.save_weights_for_sampler("after-16").result().path
    named = client.create_sampling_client(path).result()
    assert sample(named).sequences[0].tokens == one.sequences[0].tokens
    assert named.get_base_model() == "tiny"
    saved = first.save_state("whole").result().path
    again = client.create_training_client_from_state_with_optimizer(saved).result()
    np.testing.assert_array_equal(logprobs(again)[0], logprobs(first)[0])
    assert again.get_info().lora_rank == 4
    want = step(first, [datum()]).metrics, step(again, [datum()]).metrics
    assert want[0] == want[1]
    np.testing.assert_array_equal(logprobs(again)[0], logprobs(first)[0])
    fresh = client.create_training_client_from_state(saved).result()
    step(fresh, [datum()])
    assert np.abs(logprobs(fresh)[0] - logprobs(first)[0]).max() > 1e-4  # Adam began anew
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        first.save_state("whole").result()
    assert first.save_state("whole", overwrite=True).result().path == saved


def test_prompts_are_scored_as_the_learner_does_and_the_base_is_nobodys_adapter(client, trained):
    (first, _), _ = trained
    base = client.create_sampling_client(base_model="tiny").result()
    sampler = first.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert scored[0] is None
    np.testing.assert_array_equal(np.float32(scored[1:]), logprobs(first)[0])
    last = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT), 3).result()
    assert last[:-3] == [None] * 14
    np.testing.assert_allclose(last[-3:], scored[-3:], atol=1e-6)
    assert np.mean(base.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()[1:]) < -6
    targets = np.full((6, 2), -1)
    targets[5] = TEXT[7], TEXT[6]
    more = dict(
        include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_numpy(targets), prompt_alt_tokens_k=3,
    )  # fmt: skip
    found = sample(sampler, more=more)
    assert found.topk_prompt_logprobs[0] is None and len(found.topk_prompt_logprobs) == 7
    top = found.sequences[0].topk_logprobs
    assert [pair[0][0] for pair in top] == found.sequences[0].tokens
    np.testing.assert_allclose([pair[0][1] for pair in top], found.sequences[0].logprobs, atol=1e-5)
    told = found.target_prompt_logprobs.to_numpy()
    assert told[:5].any() == 0 and told[5, 1] == pytest.approx(found.prompt_logprobs[6], abs=1e-5)
    drawn = found.prompt_alt_tokens
    assert drawn.tokens.to_numpy().shape == drawn.logprobs.to_numpy().shape == (6, 3)
    assert (drawn.tokens.to_numpy()[1:] == np.asarray(TEXT[2:7])[:, None]).all()  # greedy


def test_stops_are_texts_or_ids_or_none_at_all(trained, client):
    (first, _), _ = trained
    sampler = first.save_weights_and_get_sampling_client().result()
    for stop in ("82", ["x", "82"], [ord("2")]):
        one = sample(sampler, max_tokens=9, stop=stop).sequences[0]
        assert bytes(one.tokens) == b"9182" and one.stop_reason == "stop"
    none = sample(client.create_sampling_client(base_model="tiny").result(), 8, temperature=3.0,
                  max_tokens=50, stop=[])  # fmt: skip
    assert {len(one.tokens) for one in none.sequences} == {50}
    seeded = [sample(sampler, temperature=3.0, seed=5).sequences[0].tokens for _ in range(2)]
    other = sample(sampler, temperature=3.0, seed=6).sequences[0].tokens
    assert seeded[0] == seeded[1] != other


def test_more_samplers_than_slots_each_sample_with_their_own_weights(client, trained):
    both, _ = trained
    base = client.create_sampling_client(base_model="tiny").result()
    samplers = [one.save_weights_and_get_sampling_client().result() for one in (*both, *both)]
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=4, seed=1)
    asked = [s.sample(prompt, 1, params) for s in [*samplers, base] * 3]
    told = [x.result().sequences[0] for x in asked]
    for i in range(5):
        for again in told[i::5]:
            assert again.tokens == told[i].tokens
    own = logprobs(both[0], [datum(PROMPT + told[0].tokens)])[0][6:]
    np.testing.assert_allclose(told[0].logprobs, own, atol=1e-5)


def test_two_calls_add_up_to_one_and_datums_without_weight_add_nothing(make):
    one, two = make(), make()
    data = [datum(), datum(TEXT[3:])]
    silent = datum(weights=np.zeros(16, np.float32))
    step(one, data)
    _ = [two.forward_backward([x], "cross_entropy") for x in (*data, silent)]
    two.optim_step(ADAM).result()
    np.testing.assert_allclose(logprobs(one)[0], logprobs(two)[0], atol=2e-5)


def test_settings_of_a_step_are_those_of_the_call(make):
    still, clipped, usual = make(), make(), make()
    before = logprobs(still)[0]
    step(still, [datum()], adam=types.AdamParams(learning_rate=0.0))
    np.testing.assert_array_equal(logprobs(still)[0], before)
    huge = types.AdamParams(learning_rate=3e-3, eps=1e9)
    step(clipped, [datum()], adam=huge)
    np.testing.assert_allclose(logprobs(clipped)[0], before, atol=1e-4)
    step(usual, [datum()])
    assert np.abs(logprobs(usual)[0] - before).max() > 0.1


def rl(ids=TEXT, **more):
    rng = np.random.default_rng(0)
    numbers = {"logprobs": rng.normal(-6, 1, 16), "advantages": rng.normal(size=16), **more}
    return datum(ids, **{k: np.asarray(v, np.float32) for k, v in numbers.items()})


def expected(loss, new, d, low=0.8, high=1.2, beta=0.05):
    """Losses by their definitions."""
    old, adv = (d.loss_fn_inputs[k].to_numpy() for k in ("logprobs", "advantages"))
    ratio = np.exp(new - old)
    if loss == "gspo":
        mask = d.loss_fn_inputs["sequence_ratio_mask"].to_numpy() != 0
        ratio = np.full_like(new, np.exp((new - old)[mask].mean()))
    clipped = np.clip(ratio, low, high)
    return {
        "importance_sampling": -ratio * adv,
        "ppo": -np.minimum(ratio * adv, clipped * adv),
        "gspo": -np.minimum(ratio * adv, clipped * adv),
        "cispo": -clipped * new * adv,
        "dro": -(new * adv - 0.5 * beta * (new - old) ** 2),
    }[loss].sum()


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_are_their_definitions(make, loss):
    training, d = make(), rl()
    if loss == "gspo":
        d = rl(sequence_ratio_mask=np.arange(16) > 7)
    new = logprobs(training)[0]
    beta = {"beta": 0.05} if loss == "dro" else None
    found = training.forward_backward([d], loss, beta).result()
    assert found.metrics["loss:sum"] == pytest.approx(expected(loss, new, d), rel=1e-4)
    only = training.forward([d], loss, beta).result()
    assert only.metrics["loss:sum"] == pytest.approx(found.metrics["loss:sum"], rel=1e-5)
    if loss in ("ppo", "cispo", "gspo"):
        config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01}
        other = training.forward([d], loss, config).result().metrics["loss:sum"]
        assert other == pytest.approx(expected(loss, new, d, 0.5, 1.01), rel=1e-4)
        extra = {name: np.full(16, x) for name, x in config.items()}
        mask = {k: d.loss_fn_inputs[k].to_numpy() for k in d.loss_fn_inputs if "mask" in k}
        each = training.forward([rl(**mask, **extra)], loss).result().metrics["loss:sum"]
        assert each == pytest.approx(other, rel=1e-5)


def test_several_targets_at_a_position_are_a_soft_target(make):
    training, rng = make(), np.random.default_rng(0)
    targets, weights = rng.integers(0, 200, (16, 3)), rng.uniform(size=(16, 3)).astype(np.float32)
    weights[:, 2] = 0
    model_input = types.ModelInput.from_ints(TEXT[:-1])

    def of(t, w):
        inputs = {"target_tokens": t, "weights": w}
        return types.Datum(model_input=model_input, loss_fn_inputs=inputs)

    def sparse(x):
        kind, rows = "int64" if x.dtype == int else "float32", [*range(0, 34, 2)]
        return types.TensorData(x[:, :2].reshape(-1), kind, [16, 3], rows, [0, 1] * 16)

    dense = training.forward([of(targets, weights)], "cross_entropy").result()
    found = dense.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert found.shape == (16, 3)
    single = [logprobs(training, [of(targets[:, k], weights[:, k])])[0] for k in range(3)]
    np.testing.assert_allclose(found, np.stack(single, 1), atol=1e-5)
    assert dense.metrics["loss:sum"] == pytest.approx(-(found * weights).sum(), rel=1e-5)
    data = [of(sparse(targets), sparse(weights))]
    csr = training.forward_backward(data, "cross_entropy").result()
    assert csr.metrics["loss:sum"] == pytest.approx(dense.metrics["loss:sum"], rel=1e-5)


def test_custom_losses_run_in_the_client_in_two_passes(make):
    torch = pytest.importorskip("torch")
    one, two = make(), make()

    def loss(data, found):
        return -torch.stack([x.sum() for x in found]).sum(), {"mine:sum": 1.0}

    passed = one.forward_backward_custom([datum()], loss)
    one.optim_step(ADAM).result()
    assert passed.result().metrics["mine:sum"] == 1
    step(two, [datum()])
    np.testing.assert_allclose(logprobs(one)[0], logprobs(two)[0], atol=1e-5)


def test_chunks_of_a_call_come_in_any_order_and_many_calls_wait(make, monkeypatch):
    training, other = make(), make()
    config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    monkeypatch.setattr(training.holder, "_client_config", config)
    data = [datum(TEXT[i:]) for i in range(4)]
    found = step(training, data)
    monkeypatch.undo()
    assert [len(x["logprobs"].data) for x in found.loss_fn_outputs] == [16, 15, 14, 13]
    whole = step(other, data)
    assert found.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)


def test_a_waiter_that_gives_up_strands_no_other(client):
    sampler = client.create_sampling_client(base_model="tiny").result()
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=40)

    async def run():
        left, stays = (sampler.sample(prompt, 1, params) for _ in range(2))
        waiting = asyncio.create_task(left.coroutine())
        await asyncio.sleep(0.01)
        waiting.cancel()
        return await stays

    assert asyncio.run(run()).sequences[0].tokens


def test_weights_are_listed_described_and_deleted(client, make):
    rest, training = client.create_rest_client(), make()
    path = training.save_state("first", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    [found] = rest.list_checkpoints(training.model_id).result().checkpoints
    assert found.tinker_path == path and found.expires_at and found.user_metadata == {"a": "b"}
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    [found] = rest.list_checkpoints(training.model_id).result().checkpoints
    assert found.expires_at is None and found.checkpoint_type == "training" and found.size_bytes
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.base_model == "tiny" and run.last_checkpoint.tinker_path == path
    runs = rest.list_training_runs(limit=1000).result().training_runs
    assert training.model_id in [run.training_run_id for run in runs]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="no weights"):
        client.create_training_client_from_state(path).result()
    assert path not in [x.tinker_path for x in rest.list_user_checkpoints().result().checkpoints]
    assert rest.get_server_capabilities().result().supported_models[0].max_context_length == 64
    session = training.model_id.partition(":")[0]
    assert training.model_id in rest.get_session(session).result().training_run_ids
    assert session in rest.list_sessions().result().sessions


def test_external_weights_are_a_peft_folder_behind_urls_without_a_key(client, make):
    import httpx

    training = make()
    path = training.save_weights_external("peft").result().path
    urls = client.create_rest_client().get_external_weights_urls(path).result().urls
    assert {*urls} == {"adapter_config.json", "adapter_model.safetensors"}
    config = httpx.get(urls["adapter_config.json"])
    assert config.json()["r"] == 4 and config.json()["lora_alpha"] == 32
    assert httpx.get(urls["adapter_config.json"][:-4] + "0000").status_code == 403
    client.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(urls["adapter_config.json"]).status_code == 403
