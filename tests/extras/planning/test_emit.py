"""Jobs that ``plan --emit`` writes: what they run, where, and what happens at their end."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import small
import yaml
from commands import code_of

from marft_jax import cli
from marft_jax.errors import BadInput
from marft_jax.extras.planning import command, emit, planner, topology, verdict
from marft_jax.extras.planning.chips import GPUS, TPUS
from marft_jax.extras.planning.compile import Compiled, describe
from marft_jax.extras.planning.cost import costs
from marft_jax.extras.planning.topology import Topology
from marft_jax.extras.planning.verdict import Plan
from marft_jax.extras.planning.work import step_work
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.settings.config import Config
from marft_jax.types import MAIN

# chips of a host and hosts of each, as the compilers tell them
SHAPES = {"v5e:4x4": (4, 4), "v5p:4x4x4": (4, 16), "h100:2x8": (8, 2), "h100:8": (8, 1)}
BASE = "Qwen/Qwen2.5-7B-Instruct"
SMALL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EMIT = ["--emit", "slurm", "--out", "/nowhere/job.sh"]
MESH = {"data": 2, "fsdp": 1, "tensor": 4}
WORDS = ["it's $HOME $(date) `id` $$ $(JOB_COMPLETION_INDEX)", 'two\n\nlines "quoted" \\',
         "é 😀", "-", "a: b # c"]  # fmt: skip
"""What users' flags may hold."""


def hosts_of(name: str) -> emit.Hosts:
    each, hosts = SHAPES.get(name, (1, 1))
    kind = name.partition(":")[0]
    chip = TPUS.get(kind) or (GPUS[kind].chip if kind in GPUS else None)
    return emit.hosts_of(Topology(name, [None] * each * hosts, [None] * each, hosts, chip))


def settings(run: str, *words: str) -> Config:
    config = cli.parse(["--model.base", BASE, "--model.context", "2048", *words])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run))


def job_of(kind: str, name: str, servers: str | None = None, run: str = "", **changes) -> emit.Job:
    run = run or ("gs://bucket/runs/mine" if kind == "skypilot" else "runs/mine")
    flags = {"model.base": [BASE], "team.stop": WORDS, "run.dir": [run]}
    image = "registry/image:1" if kind == "jobset" else None
    served = emit.servers_of(servers) if servers else None
    job = emit.Job(kind, settings(run), ["it's mine.yaml"], flags, hosts_of(name), served, image)
    job = job._replace(**changes)
    emit.check(job)
    return job


def written(*arguments: Any, team: Any = None, **changes: Any) -> str:
    return emit.manifest(job_of(*arguments, **changes), MESH, team or small.team())


def run_in(folder: Path, script: str, **environment: str) -> tuple[int, list[list[str]]]:
    """Runs a script whose programs only write down how they were called, without their names."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "curl", "python", "scancel"):
        (programs / name).write_text(
            f"#!/bin/bash\n[[ $1 == show ]] && echo node-a && echo node-b\n"
            f'printf "%s\\0" {name} "$@" "" >> {log}\necho >> {log}\nexit "${{{name}_ends:-0}}"'
        )
        (programs / name).chmod(0o755)
    home = {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
    how: Any = dict(env=home | environment, cwd=folder, stdin=subprocess.DEVNULL, timeout=60)
    done = subprocess.run(["bash", "-c", script], **how)
    calls = log.read_text(encoding="utf-8").split("\0\0\n")
    return done.returncode, [call.split("\0") for call in calls[:-1]]


def words_of(text: str, kind: str, folder: Path) -> list[str]:
    """The training command, as its first process receives it."""
    if kind == "jobset":
        [*_, train] = yaml.safe_load(text)["spec"]["replicatedJobs"]
        command = train["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
        known = {"$$": "$", "$(JOB_COMPLETION_INDEX)": "0"}  # as Kubernetes expands them
        return [re.sub(r"\$(\$|\(\w+\))", lambda m: known.get(m[0], m[0]), x) for x in command]
    if kind == "skypilot":
        [*_, train] = yaml.safe_load_all(text)
        (folder / "marft/bin").mkdir(parents=True, exist_ok=True)
        (folder / "marft/bin/python").symlink_to(folder / "bin" / "python")
        sky = dict(SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="0")
        sky["SKYPILOT_JOBGROUP_NAME"] = "marft-mine"
        return run_in(folder, train["run"], **sky)[1][-1]
    slurm = dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST_HET_GROUP_1="node-[a-b]")
    _, calls = run_in(folder, text, **slurm)
    [train] = [call for call in calls if "marft_jax.train" in call]
    return train


def flags_of(words: list[str]) -> dict[str, list[str]]:
    found = cli.split(words[words.index("marft_jax.train") + 1 :])
    assert found[0] == ["it's mine.yaml"]
    return found[1]


CASES = [(kind, name, servers) for kind in emit.KINDS for name in SHAPES
         for servers in (None, "h100:2x1")
         if not (kind == "slurm" and name.startswith("v5"))]  # fmt: skip


@pytest.mark.parametrize("kind, name, servers", CASES)
def test_a_job_trains_with_the_flags_of_the_plan_on_all_its_hosts(kind, name, servers, tmp_path):
    text = written(kind, name, servers)
    flags = flags_of(words_of(text, kind, tmp_path))
    shown = {"jobset": "/shared/runs/mine", "skypilot": "gs://bucket/runs/mine"}
    assert flags["run.dir"] == [shown.get(kind, "runs/mine")]
    assert flags["model.base"] == [BASE] and flags["team.stop"] == WORDS
    assert {f"mesh.{axis}": [str(size)] for axis, size in MESH.items()}.items() <= flags.items()
    several = SHAPES[name][1] > 1
    first = {"jobset": "marft-mine-train-0-0.marft-mine:8476", "skypilot": "10.0.0.1:8476"}
    where = "auto" if name.startswith("v5") else first.get(kind, "auto")
    assert flags.get("mesh.coordinator") == ([where] if several else None)
    numbers = (flags.get("mesh.processes"), flags.get("mesh.process"))
    assert numbers == ((["2"], ["0"]) if several and where != "auto" else (None, None))
    urls = {
        "jobset": [f"http://marft-mine-servers-0-{i}.marft-mine:8000" for i in (0, 1)],
        "skypilot": [f"http://servers-{i}.marft-mine:8000" for i in (0, 1)],
        "slurm": ["http://node-a:8000", "http://node-b:8000"],
    }
    folder = f"{tmp_path}/adapters" if kind == "slurm" else "/shared/adapters"
    sampler = {"rollout.sampler": ["http"], "rollout.urls": urls[kind]}
    sampler |= {"rollout.sampler_folder": [f"{folder}/marft-mine"]}
    sampler = sampler if servers else {}.fromkeys(sampler)
    assert {key: flags.get(key) for key in sampler} == sampler


@pytest.mark.parametrize(
    "name, labels, limit, hosts",
    [
        ("v5e:4x4", ["tpu-v5-lite-podslice", "4x4"], {"google.com/tpu": 4}, 4),
        ("v5p:4x4x4", ["tpu-v5p-slice", "4x4x4"], {"google.com/tpu": 4}, 16),
        ("h100:2x8", ["NVIDIA-H100-80GB-HBM3"], {"nvidia.com/gpu": 8}, 2),
    ],
)
def test_a_jobset_has_a_pod_for_each_host_and_starts_after_its_servers(name, labels, limit, hosts):
    spec = yaml.safe_load(written("jobset", name, "l4:3x1"))["spec"]
    servers, train = spec["replicatedJobs"]
    own = train["template"]["spec"]
    assert own["parallelism"] == own["completions"] == hosts
    assert [*own["template"]["spec"]["nodeSelector"].values()] == labels
    assert own["template"]["spec"]["containers"][0]["resources"] == {"limits": limit}
    assert servers["template"]["spec"]["completions"] == 3
    assert train["dependsOn"] == [{"name": "servers", "status": "Ready"}]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["train"]


def test_a_jobset_starts_again_without_limit_after_75_or_without_its_node():
    spec = yaml.safe_load(written("jobset", "v5e:4x4"))["spec"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    [train] = spec["replicatedJobs"]
    assert train["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    code, gone = train["template"]["spec"]["podFailurePolicy"]["rules"]
    assert code["onExitCodes"]["values"] == [75] and code["action"] == gone["action"] == "FailJob"
    assert gone["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


@pytest.mark.parametrize(
    "name, chips, nodes",
    [
        ("v5e:4x4", "tpu-v5litepod-16", 1),
        ("v5p:4x4x4", "tpu-v5p-128", 1),
        ("h100:2x8", "H100:8", 2),
    ],
)
def test_a_task_of_skypilot_recovers_from_75(name, chips, nodes):
    task = yaml.safe_load(written("skypilot", name))
    assert (task["resources"]["accelerators"], task["num_nodes"]) == (chips, nodes)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    group, servers, train = yaml.safe_load_all(written("skypilot", name, "a100:2x1"))
    assert group["primary_tasks"] == ["train"] and servers["num_nodes"] == 2
    assert servers["resources"] == {"accelerators": "A100-80GB:1"}
    assert train["file_mounts"] == servers["file_mounts"]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_script_of_slurm_is_queued_again_after_75_alone(code, tmp_path):
    how = dict(SLURM_JOB_ID="7", srun_ends=str(code))
    done, calls = run_in(tmp_path, written("slurm", "h100:8"), **how)
    requeued = ["scontrol", "requeue", "7"] in calls
    assert (done, requeued) == (code, code == 75)


def test_a_script_of_slurm_waits_for_the_training_that_its_signal_stops(tmp_path):
    """However often the signal comes; srun itself would kill its tasks."""
    script = written("slurm", "h100:2x8", "h100:2x1")
    run_in(tmp_path, "srun")  # makes the programs
    (tmp_path / "bin/srun").write_text(
        "#!/bin/bash\n[[ $* == *serve* ]] && exit\n"
        f"trap 'sleep 0.5; exit 75' TERM; echo $$ > {tmp_path}/pid; for i in {{1..300}}; do "
        "sleep 0.1; done"
    )
    (tmp_path / "bin/scancel").write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/cancelled; kill -TERM $(cat {tmp_path}/pid)'
    )
    where = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    where["SLURM_JOB_NODELIST_HET_GROUP_1"] = "nodes"
    process = subprocess.Popen(["bash", "-c", script], env=where, cwd=tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.05)
    for _ in range(2):
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "--signal=TERM 7+0" in (tmp_path / "cancelled").read_text()
    assert "requeue" in (tmp_path / "log").read_text()


def test_a_script_of_slurm_gives_each_process_the_gpus_of_its_node():
    text = written("slurm", "h100:2x8", "l4:3x2")
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\n" in text
    learns, plays = text.split("#SBATCH hetjob")
    assert "--nodes=2\n" in learns and "--gres=gpu:8\n" in learns
    assert "--nodes=3\n" in plays and "--gres=gpu:2\n" in plays


def test_a_server_has_room_for_each_version_of_each_adapter():
    config = settings("runs/mine", "--lora.rank", "20", "--rollout.lag", "1")
    text = written("jobset", "h100:8", "h100:1x2", config=config, team=small.team(3))
    [servers, _] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    [container] = servers["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["vllm", "serve", BASE, "--enable-lora"]
    flags = cli.split(container["command"][4:])[1]
    assert flags["max_lora_rank"] == ["32"] and flags["tensor_parallel_size"] == ["2"]
    assert (flags["max_loras"], flags["max_cpu_loras"]) == (["3"], ["9"])
    assert flags["logprobs_mode"] == ["processed_logprobs"]
    assert "raw_logprobs" in written("slurm", "h100:8", "h100:1", team=small.team(top_p=0.9))


def test_a_plan_with_less_memory_keeps_it_in_its_job(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert all("MEM_FRACTION" in written(kind, "h100:8") for kind in emit.KINDS)
    assert "MEM_FRACTION" not in written("jobset", "v5e:4x4")


@pytest.mark.parametrize(
    "arguments, changes, message",
    [
        (("jobset", "cpu:8"), {}, "expected a topology of a100, .*, got cpu"),
        (("jobset", "h100:8"), {"image": None}, "expected --image .*, got None"),
        (("slurm", "h100:8"), {"image": "x"}, "expected no --image, got x"),
        (("skypilot", "h100:8", None, "runs/mine"), {}, "expected gs://… or s3://… with"),
        (("jobset", "h100:8", None, "../mine"), {}, "a path below /shared .* got ../mine"),
        (("slurm", "h100:8", "h100:1"), {"flags": {"rollout.slots": ["8"]}}, "got rollout.slots"),
        (("slurm", "h100:8", "cpu:2x1"), {}, "--servers: .* as h100:2x1.* got 'cpu:2x1'"),
    ],
)
def test_a_job_that_cannot_be_written_is_refused(arguments, changes, message):
    with pytest.raises(BadInput, match=message):
        job_of(*arguments, **changes)


@pytest.mark.parametrize(
    "words, servers, message",
    [
        (["--model.base", "tiny"], "h100:1", "one base for all agents, and not tiny"),
        (["--lora.rank", "513"], "h100:1", "--lora.rank up to 512, got 513"),
        (["--team.file", "configs/teams/two_bases.yaml"], "h100:1", "got several bases"),
        (["--model.base", "configs/models/qwen2.5-7b"], None, "expected a hub id"),
    ],
)
def test_a_base_that_nobody_can_load_is_refused(words, servers, message, repository, monkeypatch):
    monkeypatch.chdir(repository)
    with pytest.raises(BadInput, match=message):
        job_of("slurm", "h100:8", servers, config=settings("runs/mine", *words))


RUNS = [
    "a_b", "a.b", "A-b", "L\u00e4uf 1", "\u65e5\u672c", "\u6771\u4eac", "-x-", "targets=[q,v]",
    "1", *(f"sweep-of-many-settings-with-seed-{seed}" for seed in (1, 2)),
]  # fmt: skip


def test_runs_of_any_names_are_jobs_of_different_names_that_clusters_allow():
    names = [job_of("slurm", "h100:8", None, f"runs/{name}").name for name in (*RUNS, "a-b")]
    assert len({*names}) == len(names) and names[-1] == "marft-a-b"
    for name in names:
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) < 45


@pytest.fixture
def base(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


WITH_COMPILER = bool(importlib.util.find_spec("jax_plugins"))
WITHOUT_COMPILER = pytest.mark.skipif(WITH_COMPILER, reason="a GPU's compiler is installed")


@WITHOUT_COMPILER
@pytest.mark.parametrize(
    "where, mesh",
    [("h100:1", "1 1 1"), ("h100:2", "2 1 1"), ("a100:2x4", "4 1 2"), ("h100:2x2", "2 1 2")],
)
@pytest.mark.parametrize("more", [(), ("--servers", "h100:2x1")], ids=str)
def test_a_job_for_gpus_is_written_without_their_compiler(base, capsys, where, mesh, more):
    out = base / "job.sh"
    words = ["--topology", where, "--emit", "slurm", "--out", str(out), *more]
    words += ["--mesh.tensor", mesh.split()[-1], "--model.base", str(base)]
    assert code_of(command.main, *words) == 0
    told = capsys.readouterr().out
    assert "not checked" in told and f"sbatch {out}" in told
    text = out.read_text()
    axes = zip(("data", "fsdp", "tensor"), mesh.split(), strict=True)
    assert all(f"--mesh.{axis} {size}" in text for axis, size in axes)


@WITHOUT_COMPILER
@pytest.mark.parametrize(
    "words, message",
    [
        (["--topology", "h100:2"], 'pip install -e ".[gpu-plans]"'),
        (["--topology", "h100:2", "--mesh.tensor", "3", *EMIT], "--mesh"),
        (["--topology", "v5e:2x2x2x2", *EMIT], "--topology"),
    ],
)
def test_what_needs_a_compiler_or_cannot_be_is_refused(words, message, base, capsys):
    assert code_of(command.main, *words, "--model.base", base) == 2
    assert message in capsys.readouterr().err


def test_what_lies_on_this_machine_alone_is_refused(tmp_path):
    (tmp_path / "base.gguf").touch()
    local = settings("runs/mine", "--model.base", str(tmp_path / "base.gguf"))
    job_of("slurm", "h100:8", config=local, files=["/shared/mine.yaml"])
    with pytest.raises(BadInput, match="--model.base: expected a hub id"):
        job_of("jobset", "h100:8", config=local)
    for file in ("/shared/mine.yaml", "configs/../../mine.yaml"):
        with pytest.raises(BadInput, match="expected a path in this folder"):
            job_of("skypilot", "h100:8", files=[file])


def planned(monkeypatch, memory: float, *words: str) -> tuple[int | str | None, Config]:
    """Plans on GPUs that are CPUs, without compiling; returns the exit code and what is planned."""
    asked: list[Config] = []

    def plans(config: Config, where: Topology, log: Any) -> dict[str, Any]:
        asked.append(config)
        team = small.team()
        work, how = step_work(config, team, "sequential"), find_algorithm("appo")
        run = describe(config, team, how, small.CONFIG, work, where)
        programs = {"gradients": Compiled(0.0), "optimiser": Compiled(0.0)}
        held, peaks = verdict.memory_of(run, programs)
        where = where._replace(chip=GPUS["h100"].chip._replace(memory=memory))
        return {MAIN: Plan(run, where, programs, costs(run, programs), held, peaks)}

    found = topology.find_topology("cpu:2x4")._replace(name="h100:2x4")
    monkeypatch.setattr(topology, "find_topology", lambda name, **how: found)
    monkeypatch.setattr(planner, "plans", plans)
    return code_of(command.main, "--topology", "h100:2x4", *words), asked[0]


def test_a_plan_that_fits_writes_its_job_and_tells_how_to_start_it(monkeypatch, tmp_path, capsys):
    out = tmp_path / "job.sh"
    words = ["--emit", "slurm", "--out", str(out), "--run.dir", "runs/mine", "--algo.lr", "1e-4"]
    code, config = planned(monkeypatch, 1e12, *words)
    assert code == 0 and f"wrote {out}; sbatch {out}" in capsys.readouterr().out
    assert config == cli.parse(words[4:])
    flags = cli.split(words_of(out.read_text(), "slurm", tmp_path)[5:])[1]
    assert flags["algo.lr"] == ["1e-4"] and flags["mesh.data"] == ["8"]
    assert not {"emit", "out", "topology"} & {*flags}
    out.unlink()
    assert planned(monkeypatch, 1.0, *words)[0] == 1 and not out.exists()


def test_where_servers_sample_the_topology_only_learns(monkeypatch, capsys):
    words = ["--rollout.lag", "1", "--rollout.max_turns", "9"]
    _, config = planned(monkeypatch, 1e12, "--servers", "h100:2x1", *words)
    rollout = config.rollout
    assert (rollout.sampler, rollout.lag, rollout.max_turns) == ("http", 1, 9)
    assert "sampled elsewhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--emit", "slurm"], ["--out", "x"], ["--image", "x"], ["--emit", "xpk", "--out", "x"],
     ["--emit", "slurm", "--out", "gs://bucket/job"], ["--servers", "two"]],
)  # fmt: skip
def test_a_wrong_flag_of_a_job_is_one_line_and_exit_code_2(words, capsys):
    assert code_of(command.main, "--topology", "cpu:8", *words) == 2
    assert capsys.readouterr().err.count("\n") == 1


# By the packages of others.


@pytest.mark.parametrize("kind, name, servers", [case for case in CASES if case[0] != "jobset"])
def test_shellcheck_finds_nothing(kind, name, servers, tmp_path):
    text = written(kind, name, servers, flags={"model.base": [BASE]})
    scripts = [text]
    if kind == "skypilot":
        tasks = [task for task in yaml.safe_load_all(text) if "run" in task]
        scripts = ["#!/bin/bash\n" + task[part] for task in tasks for part in ("setup", "run")]
    files = [tmp_path / f"{number}.sh" for number, _ in enumerate(scripts)]
    for file, script in zip(files, scripts, strict=True):
        file.write_text(script)
    done = subprocess.run(["shellcheck", *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.release
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("servers", [None, "h100:2x1"])
@pytest.mark.parametrize("kind", ["jobset", "skypilot"])
def test_their_packages_know_every_field_of_the_jobs(kind, name, servers):
    text = written(kind, name, servers)
    if kind == "skypilot":
        sky = pytest.importorskip("sky")
        for task in yaml.safe_load_all(text):
            if "execution" not in task:
                sky.Task.from_yaml_config(task)
        return
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for own in yaml.safe_load(text)["spec"]["replicatedJobs"]:
        head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": own["name"]}}
        kubernetes_validate.validate(head | own["template"], "1.34", strict=True)
