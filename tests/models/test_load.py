"""Opening base models, and saying clearly why one cannot be opened."""

from __future__ import annotations

import json

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from marft_jax.errors import BadInput
from marft_jax.models import config_json
from marft_jax.models.decoder import Decoder
from marft_jax.models.names import paths_by_name
from marft_jax.models.parts.part import Axes
from marft_jax.models.weights import load, safetensors
from marft_jax.settings.config import Model

SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 120,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def place(axes: Axes, array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.float32)


def tensors_of(settings: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    config = config_json.read_config(settings, "test")
    shapes = load.shapes_of(load.abstract_decoder(config, jnp.float32)[1])
    rng = np.random.default_rng(0)
    names = paths_by_name(config, shapes)
    return {name: rng.normal(size=shapes[path]).astype(dtype) for name, path in names.items()}


@pytest.fixture
def directory(tmp_path):
    """A whole, small model: configuration, weights, tokenizer."""
    from test_tokenizer import TURNS, fast

    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    save_file(tensors_of(SETTINGS), tmp_path / "model.safetensors")
    fast(TURNS, eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def base(directory) -> load.BaseModel:
    return load.load_base(Model(base=str(directory)), place)


def test_a_directory_becomes_a_decoder_with_the_values_of_its_files(directory):
    model, stored = base(directory), tensors_of(SETTINGS)
    decoder = nnx.merge(model.graphdef, model.params)
    assert isinstance(decoder, Decoder)
    query = stored["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(decoder.layers[1].mixer.q.kernel[...], query)
    np.testing.assert_array_equal(decoder.embed.embedding[...], stored["model.embed_tokens.weight"])
    assert (model.config.vocab_size, model.source) == (120, str(directory))


def test_each_tensor_is_placed_once_by_its_axes_and_its_bytes_are_counted(directory):
    placed, sizes, counted = [], [0], []
    load.load_base(
        Model(base=str(directory)),
        lambda axes, a: placed.append((axes, a.shape)) or sizes.append(a.nbytes) or jnp.asarray(a),
        report=lambda done, total: counted.append((done, total)),
    )
    done = np.cumsum(sizes).tolist()
    assert counted == [(bytes_, done[-1]) for bytes_ in done]
    config = config_json.read_config(SETTINGS, "test")
    shapes = load.shapes_of(load.abstract_decoder(config, jnp.float32)[1])
    assert sorted(shape for _, shape in placed) == sorted(shapes.values())
    table, query, norm = (shapes[path] for path in (
        "embed/embedding", "layers/0/mixer/q/kernel", "final_norm/scale"
    ))  # fmt: skip
    expected = {(("vocabulary", "model"), table), (("heads", "model"), query), ((None,), norm)}
    assert expected <= set(placed)


def test_the_contents_decide_the_digest(directory, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for file in directory.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert base(other).digest == base(directory).digest
    changed = tensors_of(SETTINGS)
    changed["model.norm.weight"][3] += 1
    save_file(changed, other / "model.safetensors")
    assert base(other).digest != base(directory).digest


def test_of_a_model_of_text_and_images_the_text_is_read(directory, caplog):
    text = SETTINGS | {"architectures": None, "sliding_window": 8}
    settings = {"model_type": "gemma3", "text_config": text}
    (directory / "config.json").write_text(json.dumps(settings))
    stored = tensors_of(settings)
    names = {name: name.replace("model.", "language_model.model.", 1) for name in stored}
    images = {"vision_tower.embeddings.weight": np.ones(3), "multi_modal_projector.w": np.ones(3)}
    written = {names[name]: x for name, x in stored.items()} | images
    save_file(written, directory / "model.safetensors")
    with caplog.at_level("INFO", "marft_jax"):
        model = base(directory)
    assert "left out 2 tensors for images or audio" in caplog.text
    decoder = nnx.merge(model.graphdef, model.params)
    query = stored["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(decoder.layers[1].mixer.q.kernel[...], query)
    norms = decoder.layers[0]
    for ours, theirs in (
        (norms.attn_post_norm, "post_attention"),
        (norms.mlp_norm, "pre_feedforward"),
        (norms.mlp_post_norm, "post_feedforward"),
    ):
        expected = stored[f"model.layers.0.{theirs}_layernorm.weight"]
        np.testing.assert_array_equal(ours.scale[...], expected)


def test_bfloat16_files_need_no_torch(directory):
    save_file(tensors_of(SETTINGS, ml_dtypes.bfloat16), directory / "model.safetensors")
    for wanted in ("bfloat16", "float32"):
        kinds = set()
        load.load_base(
            Model(base=str(directory), dtype=wanted),  # pyright: ignore[reportArgumentType]
            lambda axes, a, seen=kinds: seen.add(a.dtype.name) or jnp.asarray(a),
        )
        assert kinds == {wanted}


QWEN3 = SETTINGS | {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 136,
    "intermediate_size": 264,
    "head_dim": 80,
    "num_hidden_layers": 1,
}
QWEN3_EXPERTS = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 72,
}
IN_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def in_fp8(
    tensors: dict[str, np.ndarray], counts, suffix: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint with the matrices of its layers in fp8, and the values that these stand for.

    Args:
        counts: shape of a matrix to that of its scales.
    """
    rng, packed, plain = np.random.default_rng(1), dict(tensors), dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        (rows, width), scales = tensors[name].shape, counts(tensors[name].shape)
        packed[name] = rng.normal(size=(rows, width)).astype(ml_dtypes.float8_e4m3fn)
        own = rng.uniform(1, 2, scales).astype(ml_dtypes.bfloat16)
        packed[name + suffix] = own
        own = own.astype(np.float32).reshape(own.shape if own.ndim > 1 else (1, 1))
        along = [-(-n // count) if count in (1, n) else 128 for n, count in
                 zip((rows, width), own.shape, strict=True)]  # fmt: skip
        spread = np.kron(own, np.ones(along, np.float32))[:rows, :width]
        plain[name] = packed[name].astype(np.float32) * spread
    return packed, plain


def blocks(shape):
    return tuple(-(-n // 128) for n in shape)


@pytest.mark.parametrize(("settings", "packing", "counts", "suffix"), [
    (QWEN3, IN_FP8, blocks, "_scale_inv"),
    (QWEN3_EXPERTS, IN_FP8, blocks, "_scale_inv"),
    (QWEN3, FLOAT, lambda shape: (shape[0], 1), "_scale"),
    (QWEN3, FLOAT, lambda shape: (1,), "_scale"),
], ids=["blocks", "experts", "rows", "tensors"])  # fmt: skip
def test_fp8_is_read_as_the_values_that_it_stands_for(tmp_path, settings, packing, counts, suffix):
    """Also where scales are in another file; scales of activations are left out."""
    config = config_json.read_config(settings | {"quantization_config": packing}, "test")
    assert config == config_json.read_config(settings, "test")
    shapes = load.shapes_of(load.abstract_decoder(config, jnp.float32)[1])
    packed, plain = in_fp8(tensors_of(settings), counts, suffix)
    at = "model.layers.0.self_attn.o_proj"
    packed[f"{at}.input_scale"] = np.ones(1, np.float32)
    save_file(
        {f"{at}.weight{suffix}": packed.pop(f"{at}.weight{suffix}")}, tmp_path / "b.safetensors"
    )
    save_file(packed, tmp_path / "a.safetensors")
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    found, expected = (
        dict(safetensors.read(folder, config, shapes)) for folder in (tmp_path, tmp_path / "plain")
    )
    chex.assert_trees_all_equal(found, expected)


def test_unindexed_shards_and_ignorable_tensors_are_read(directory):
    whole = tensors_of(SETTINGS)
    whole["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].copy()
    names = sorted(whole)
    (directory / "model.safetensors").unlink()
    save_file({n: whole[n] for n in names[::2]}, directory / "a.safetensors")
    save_file({n: whole[n] for n in names[1::2]}, directory / "b.safetensors")
    assert base(directory).config.tie_embeddings


@pytest.mark.parametrize("in_order", [True, False])
def test_a_vocabulary_of_its_own_is_refused_where_the_flag_denies_it(directory, in_order):
    whole = tensors_of(SETTINGS)
    own = whole["model.embed_tokens.weight"].copy()
    own[-1, -1] += 1
    (directory / "model.safetensors").unlink()
    save_file({"lm_head.weight": own}, directory / f"{'ab'[in_order]}.safetensors")
    save_file(whole, directory / f"{'ba'[in_order]}.safetensors")
    with pytest.raises(BadInput, match="expected lm_head.weight equal to the embeddings"):
        base(directory)
    (directory / "config.json").write_text(json.dumps(SETTINGS | {"tie_word_embeddings": False}))
    opened = base(directory)
    np.testing.assert_array_equal(load.reader(opened.params)("lm_head/kernel"), own)


def parts(whole, of: str, count: int = 3):
    """The tensors in as many files, by their names."""
    names = sorted(whole)
    return {of.format(i + 1, count): {n: whole[n] for n in names[i::count]} for i in range(count)}


_OTHER = {"layers.0.attention.wq.weight": np.ones((16, 16), np.float32)}
_SET = "model-{:05d}-of-{:05d}.safetensors"


@pytest.mark.parametrize(
    "beside",
    [
        {"consolidated.safetensors": _OTHER},
        {"consolidated.00.safetensors": _OTHER},
        parts(_OTHER | {"norm.weight": np.ones(16, np.float32)}, "consolidated-{:05d}-of-{:05d}"
              ".safetensors", 2),
        {"adapter_model.safetensors": _OTHER},
        {"optimizer.safetensors": _OTHER},
        {"eagle_head.safetensors": _OTHER},
        {_SET.format(1, 7): _OTHER, _SET.format(3, 7): _OTHER},  # of an older download
    ],
    ids=lambda files: next(iter(files)),
)  # fmt: skip
def test_weights_beside_a_models_own_parts_are_not_read(directory, beside):
    expected = base(directory).params
    (directory / "model.safetensors").unlink()
    for name, tensors in {**parts(tensors_of(SETTINGS), _SET), **beside}.items():
        save_file(tensors, directory / name)
    chex.assert_trees_all_equal(base(directory).params, expected)


@pytest.mark.parametrize("name", ["weights.safetensors", "pytorch_model.safetensors"])
def test_weights_of_another_program_beside_a_whole_model_are_not_read(directory, name):
    (directory / "model.safetensors").rename(directory / name)
    save_file(_OTHER, directory / "consolidated.safetensors")
    assert base(directory).config.n_layers == 2


@pytest.mark.parametrize("lost", [[0], [1, 2]])
def test_a_set_of_parts_that_lacks_some_is_refused(directory, lost):
    (directory / "model.safetensors").unlink()
    for i, (name, tensors) in enumerate(parts(tensors_of(SETTINGS), _SET).items()):
        if i not in lost:
            save_file(tensors, directory / name)
    with pytest.raises(BadInput, match=f"all parts of one model, found {3 - len(lost)} of 3 of"):
        base(directory)


@pytest.mark.parametrize("head", ["own head", "no head"])
@pytest.mark.parametrize(
    ("above", "own"), [(True, False), (False, True), (True, True), (False, False), (None, True),
                       (None, False), (True, None), (False, None)]
)  # fmt: skip
def test_two_places_say_whether_embeddings_are_tied(directory, above, own, head):
    """Where they differ, the weights decide."""
    name = "Mistral3ForConditionalGeneration"
    text = SETTINGS | {"architectures": None, "head_dim": 8, "model_type": "mistral"}
    stored = tensors_of({"architectures": [name], "text_config": text})  # tied
    if head == "own head":
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, directory / "model.safetensors")
    del text["tie_word_embeddings"]
    settings = {"architectures": [name], "text_config": text}
    for where, flag in ((settings, above), (text, own)):
        if flag is not None:
            where["tie_word_embeddings"] = flag
    (directory / "config.json").write_text(json.dumps(settings))
    flags = {above, own} - {None}
    if flags == {True, False} or flags == {head == "no head"}:
        assert base(directory).config.tie_embeddings == (head == "no head")
    else:
        message = "equal to the embeddings" if flags == {True} else "missing: lm_head.weight"
        with pytest.raises(BadInput, match=message):
            base(directory)


UP = "model.layers.0.mlp.up_proj"
NORM, BIAS = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
IN_8_BITS = np.ones((24, 16), ml_dtypes.float8_e4m3fn)
GONE = json.dumps({"weight_map": {NORM: "gone.safetensors"}})
ROWS_90 = SETTINGS | {"vocab_size": 90}


def holding(tensors: dict[str, np.ndarray], lacks: str = ""):
    """The file with these tensors beside its own, or without a tensor."""

    def spoil(folder):
        whole = {name: x for name, x in tensors_of(SETTINGS).items() if name != lacks}
        save_file(whole | tensors, folder / "model.safetensors")

    return spoil


def saying(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def with_90_rows(folder):
    (folder / "config.json").write_text(json.dumps(ROWS_90))
    save_file(tensors_of(ROWS_90), folder / "model.safetensors")


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(("spoil", "message"), [
    (holding({}, lacks=f"{UP}.weight"), f"1 tensors are missing: {UP}.weight"),
    (holding({NORM: np.ones(17)}), rf"'{NORM}': expected shape \(16,\), got \(17,\)"),
    (holding({BIAS: np.ones(16)}), f"unexpected or repeated tensor '{BIAS}'"),
    (holding({NORM: np.ones(16, np.int8)}), f"'{NORM}': expected one of F32.*, got I8"),
    (holding({f"{UP}.weight": IN_8_BITS, f"{UP}.weight_scale_inv": np.ones((3, 2))}),
     r"up_proj.weight': .* got F8_E4M3 with scales of shape \(3, 2\)"),
    (cut_short, "not a readable safetensors file"),
    (saying("model.safetensors", "x" * 500), "not a readable safetensors file"),
    (saying("model.safetensors.index.json", GONE), "names gone.safetensors, which is missing"),
    (with_90_rows, "expected tokens below 90, the rows of the model's embedding, got"),
    (lambda d: (d / "model.safetensors").rename(d / "a.bin"), "found none; convert others"),
    (lambda d: (d / "config.json").unlink(), "expected a config.json"),
    (saying("config.json", "{"), "not a readable JSON file"),
])  # fmt: skip
def test_damaged_directories_are_one_clear_line(directory, spoil, message):
    spoil(directory)
    with pytest.raises(BadInput, match=message) as caught:
        base(directory)
    assert "\n" not in str(caught.value)


TEXTS = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "model.safetensors.index.json", "chat_template.jinja",
]  # fmt: skip


def test_a_byte_order_mark_before_the_texts_of_a_model_changes_nothing(directory):
    index = {"weight_map": dict.fromkeys(tensors_of(SETTINGS), "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    (directory / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    plain, talk = base(directory), [{"role": "user", "content": "3+5"}]
    for path in (directory / file for file in TEXTS):
        path.write_bytes("\ufeff".encode() + path.read_bytes())
    marked = base(directory)
    assert marked.tokenizer.chat(talk) == plain.tokenizer.chat(talk)
    assert marked.tokenizer.eos_ids == plain.tokenizer.eos_ids and 5 in marked.tokenizer.eos_ids
    chex.assert_trees_all_equal(marked.params, plain.params)


@pytest.mark.parametrize("name", TEXTS[:4])
def test_a_text_of_a_model_in_another_encoding_is_to_be_saved_as_utf_8(directory, name):
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    path = directory / name
    path.write_bytes(path.read_text().encode("utf-16"))
    with pytest.raises(BadInput, match="save it as UTF-8") as caught:
        base(directory)
    assert "\n" not in str(caught.value)


def beside(directory, rows: int, **special):
    """The model with that many rows, beside a tokenizer of 103 tokens."""
    from test_tokenizer import TURNS, fast

    settings = SETTINGS | {"vocab_size": rows}
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(tensors_of(settings), directory / "model.safetensors")
    tokenizer = fast(TURNS, ("<s>", "<end>", "</s>", "<pad>", "<more>", "<most>", "<image>"))
    for name, token in special.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(directory)
    return base(directory)


@pytest.mark.parametrize("rows", [99, 101, 104])
def test_a_token_without_a_row_is_refused_where_a_text_spells_it(directory, rows):
    """JAX would read another row in silence. All other texts are as they are."""
    own = beside(directory, rows, eos_token="</s>", pad_token="<pad>").tokenizer
    assert own.pad_id == (99 if rows > 99 else 98)  # else the end of a turn fills rows
    ids = {token: own.backend.convert_tokens_to_ids(token) for token in own.added.values()}
    for token, i in ids.items():
        talk = [{"role": "user", "content": f"a{token}b"}]
        if i < rows:
            assert i in own.encode(f"a{token}b") and i in own.chat(talk)
        else:
            for write, text in ((own.encode, f"a{token}b"), (own.chat, talk)):
                with pytest.raises(BadInput, match=f"below {rows}, .* got {i} .'{token}'") as told:
                    write(text)
                assert "\n" not in str(told.value)


@pytest.mark.parametrize("end", ["<more>", "<image>"])
def test_a_turn_that_ends_with_a_token_without_a_row_is_refused_at_once(directory, end):
    with pytest.raises(BadInput, match="below 100"):
        beside(directory, 100, eos_token=end)


PAIRS, HALVES = np.ones((24, 2), np.uint32), np.ones((24, 2), np.float16)
PACKED = {
    "GPTQ": dict(qweight=PAIRS, qzeros=PAIRS, scales=HALVES),
    "AWQ": dict(qweight=PAIRS.astype(np.int32), qzeros=PAIRS, scales=HALVES),
    "bitsandbytes": {"weight": np.ones((192, 1), np.uint8), "weight.absmax": HALVES},
    "MLX": dict(weight=PAIRS, scales=HALVES, biases=HALVES),
    "NVFP4": dict(weight=np.ones((24, 8), np.uint8), weight_scale=HALVES),
    "int8": dict(weight=np.ones((24, 16), np.int8), weight_scale=HALVES),
}


@pytest.mark.parametrize(
    ("kind", "key"),
    [*((kind, None) for kind in PACKED),
     *(("GPTQ", f"{x}") for x in ("quantization_config", "compression_config", "quantization"))],
)  # fmt: skip
def test_weights_that_other_programs_packed_are_refused_as_such(directory, kind, key):
    """Whether ``config.json`` says so, by any of three names, or the types of tensors show it."""
    stored = tensors_of(SETTINGS)
    del stored[f"{UP}.weight"]
    stored |= {f"{UP}.{name}": tensor for name, tensor in PACKED[kind].items()}
    save_file(stored, directory / "model.safetensors")
    says = {key: {"quant_method": kind.lower(), "bits": 4}} if key else {}
    (directory / "config.json").write_text(json.dumps(SETTINGS | says))
    with pytest.raises(BadInput, match="unquantised weights, fp8 .*or GGUF") as caught:
        base(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [["gptq"], "gptq", 4, True])
def test_a_packing_that_is_no_object_is_refused_as_such(directory, value):
    (directory / "config.json").write_text(json.dumps(SETTINGS | {"quantization_config": value}))
    with pytest.raises(BadInput, match="quantization_config .*not supported"):
        base(directory)


def test_what_is_not_there_is_one_clear_line(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for name, message in (
        ("missing/model.gguf", "no such file.*fetch_model.py"),
        (str(tmp_path / "nothing"), "expected tiny, a directory.*does not exist"),
        (str(tmp_path / "notes.txt"), "expected tiny, a directory"),
        ("nobody/no-such-model-here", "is no file or directory here, and the hub gives none"),
    ):
        with pytest.raises(BadInput, match=message) as caught:
            load.load_base(Model(base=name), place)
        assert "\n" not in str(caught.value)


def test_what_the_hub_says_is_shown_whole(monkeypatch):
    import huggingface_hub

    def absent(*_, **__):
        raise OSError(
            "404 Client Error. (Request ID: 1)\n\n" + "Not found. " * 20 + "\nLog in first."
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(BadInput, match="OSError: 404 Client Error.*Log in first.") as caught:
        load.load_base(Model(base="owner/name"), place)
    assert "\n" not in str(caught.value)
