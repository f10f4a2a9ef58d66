"""Of every family: what transformers and peft save loads here, what we export loads there.

Needs torch, transformers and peft; tiny random models, no download.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from logits import TOKENS, our_logits
from safetensors.numpy import load_file, save_file
from test_export import run_export

from marft_jax.cli import configure
from marft_jax.extras.export import huggingface
from marft_jax.interop import peft
from marft_jax.models.weights.load import load_base
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.directory import write_settings
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.run.models import open_models
from marft_jax.run.states import make_learner
from marft_jax.settings import config as config_lib
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN, without_thinking

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.release

ALL = list(published.FAMILIES)
FUSED = "Phi3ForCausalLM", "GraniteMoeHybridForCausalLM", "GptOssForCausalLM"
"""Their matrices are joined in files, so that peft cannot name all of ours."""
BY_HAND = dict.fromkeys(FUSED, ("o",)) | {
    "Lfm2ForCausalLM": ("q", "v", "o", "down", "conv_in_proj")
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of saved models, each made when it is first asked for."""
    top = tmp_path_factory.mktemp("published")

    def of(name: str) -> Path:
        folder = top / name
        return folder if folder.exists() else published.save(name, folder)

    return of


def ours(folder) -> Any:
    model = config_lib.Model(base=str(folder))
    return load_base(model, lambda _, x: jnp.asarray(x, jnp.float32))


def loaded(folder, adapter=None) -> Any:
    """As a user loads it who follows the rule of ``loader_of``."""
    loader = getattr(transformers, huggingface.loader_of(str(folder)))
    model = loader.from_pretrained(folder, dtype=torch.float32)
    return model if adapter is None else theirs.PeftModel.from_pretrained(model, adapter)


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS)).logits.float().numpy()


def close(a, b) -> None:
    # so many roundings as a forward pass of a small model has
    bounds.close(a, b, bounds.forward(), size=1.0)


@pytest.mark.parametrize("name", ALL)
def test_what_transformers_saves_computes_the_same_here(name, models):
    close(our_logits(ours(models(name))), logits(loaded(models(name))))


def older(name: str) -> str:
    name = name.replace("lm_head", "language_model.lm_head")
    return re.sub(r"^model\.language_model\.", "language_model.model.", name)


@pytest.mark.parametrize("name", [x for x in ALL if x.endswith("ForConditionalGeneration")])
def test_older_names_of_the_text_of_a_model_of_text_and_images(name, models, tmp_path):
    old = copied(models(name), tmp_path / "old")
    tensors = load_file(old / "model.safetensors")
    save_file({older(k): v for k, v in tensors.items()}, old / "model.safetensors")
    close(our_logits(ours(old)), our_logits(ours(models(name))))


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """Run directories with random adapters that matter, on each family."""
    top = tmp_path_factory.mktemp("runs")

    def of(name: str) -> Path:
        if not (folder := top / name).exists():
            targets = BY_HAND.get(name)
            config = configure(
                model={"base": str(models(name)), "context": 256},
                lora={"rank": 4, **({"targets": targets} if targets else {})},
                team={"max_new_tokens": 6, "temperature": 1.0},
                run={"dir": str(folder)},
                eval={"temperature": 0.0},
            )
            with open_models(config, Blueprint(BUILT_IN)) as opened:
                state, rng = make_learner(opened).init(), np.random.default_rng(0)

                def draw(x):
                    own = jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype)
                    return jax.device_put(own, x.sharding)

                saved = state.with_adapters(jax.tree.map(draw, state.adapters))
                write_settings(folder, opened.config, Blueprint(BUILT_IN))
                identity = identity_of(opened.config, opened.bases, opened.team)
                with Checkpoints(folder, identity, 1) as checkpoints:
                    checkpoints.save(1, saved._replace(step=jnp.int32(1)))
            np.save(folder / "factors.npy", jax.device_get(saved.adapters[MAIN]), allow_pickle=True)
        return folder

    return of


def factors_of(run: Path, n: int) -> Any:
    adapters = np.load(run / "factors.npy", allow_pickle=True).item()
    return jax.tree.map(lambda x: np.asarray(x[n]), adapters)


@pytest.mark.parametrize("name", ALL)
def test_an_exported_team_is_that_of_the_run_for_transformers_and_peft(
    name, models, runs, tmp_path, monkeypatch
):
    run, out = runs(name), tmp_path / "out"
    assert run_export("--run", run, "--out", out) == 0
    base = copied(models(name), out / models(name).name)
    # the card's snippet, as it stands
    snippet = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)[0]
    monkeypatch.chdir(out)
    exec(compile(snippet, "README.md", "exec"), found := {})
    adapter = factors_of(run, 0)
    computed = our_logits(ours(base), adapter, 16.0)
    close(computed, logits(found["model"]))
    assert np.abs(computed - our_logits(ours(base))).max() > 0.01  # the adapter matters
    # prompts as another server renders them
    plan, texts = json.loads((out / "turns.json").read_text("utf-8")), list[str]()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    how = {"chat_template": (out / "chat_template.jinja").read_text("utf-8"), "tokenize": False}
    for asked, turn in zip(LoadedTeam(run).ask("3+5+9=?").turns, plan["turns"], strict=True):
        for own in turn["messages"]:
            own["content"] = own["content"].format(task="3+5+9=?", texts=texts)
        text = tokenizer.apply_chat_template(turn["messages"], add_generation_prompt=True, **how)
        assert tokenizer.encode(text, add_special_tokens=False) == asked.prompt.tolist()
        texts.append(without_thinking(asked.text))


def copied(folder: Path, into: Path) -> Path:
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    return into


@pytest.mark.parametrize("name", ALL)
def test_a_merged_model_computes_the_same_there(name, models, runs, tmp_path):
    run, out = runs(name), tmp_path / "out"
    flags = "--format", "merged", "--agent", "solver"
    assert run_export("--run", run, "--out", out, *flags) == 0
    card = (out / "README.md").read_text()
    loader = re.findall(r"`(Auto\w+)\.from_pretrained", card)[0]
    model = getattr(transformers, loader).from_pretrained(out / "solver", dtype=torch.float32)
    expected = our_logits(ours(models(name)), factors_of(run, 1), 16.0)
    close(logits(model), expected)
    close(our_logits(ours(out / "solver")), expected)
    settings = json.loads((out / "solver" / "config.json").read_text())
    assert huggingface.loader_of(str(out / "solver")) == loader
    assert model.config.architectures == settings["architectures"]


MATRICES = (
    r"(?!.*(visual|vision|experts))"
    r".*layers\..*\.(q_proj|v_proj|o_proj|w1|in_proj_qkv|mlp.gate_proj)"
)
"""Some matrices of the layers of the text, as peft's users name them."""


@pytest.mark.parametrize("name", [x for x in ALL if x not in FUSED])
def test_what_peft_saves_computes_the_same_here(name, models, tmp_path):
    model = loaded(models(name))
    settings = theirs.LoraConfig(r=4, lora_alpha=16, target_modules=MATRICES,
                                 init_lora_weights=False)  # fmt: skip
    model = theirs.get_peft_model(model, settings)
    model.save_pretrained(tmp_path)
    base, read = ours(models(name)), peft.read(tmp_path)
    fresh = zeros_like(base, read)
    close(our_logits(base, fresh, read.scale * read.rank), logits(model))


def zeros_like(base, read) -> Any:
    """The adapter as stacks of matrices."""
    found: Any = {}
    for stack, matrices in base.config.matrices().items():
        layers, target = base.config.layers_with(stack), peft.matrix_of(stack)
        own = [read.matrices.get((target, layer)) for layer in layers]
        if any(pair is not None for pair in own):
            pairs = [pair or (np.zeros((m.d_in, read.rank)), np.zeros((read.rank, m.d_out)))
                     for pair, m in zip(own, matrices, strict=True)]  # fmt: skip
            found[stack] = {x: np.stack([p[i] for p in pairs]).astype(np.float32)
                            for i, x in enumerate("ab")}  # fmt: skip
    return found
