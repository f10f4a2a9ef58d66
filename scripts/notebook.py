"""A team trained, asked and read from Python, on the built-in model; in cells, as editors and
Jupyter (with jupytext) show them.

    python scripts/notebook.py          # all of them, in about half a minute on 2 CPU cores
"""

# %% Settings: YAML files, values by name, sections; what comes later wins
import marft_jax

config = marft_jax.configure(
    {"algo.episodes": 32, "env.difficulty": 2},
    run={"dir": "runs/notebook", "steps": 10, "transcripts_every": 1},
)


# %% Training: a function sees every step; the same cell again goes on where the run is
def watch(step: marft_jax.TrainedStep) -> bool:
    """Ends the run, saved, when nearly all answers are right."""
    best = max(step.episodes, key=lambda episode: episode.reward)
    print(f"  {best.task!r}: {[turn.text for turn in best.turns]}")
    return step.metrics["reward/mean"] > 0.95


marft_jax.train_team(config, on_step=watch)

# %% Evaluation on tasks that training never saw, with 95 % intervals
scores = marft_jax.evaluate_team(config.run.dir, limit=32)
for (benchmark, who), score in scores.items():
    print(benchmark, who, score.average)

# %% Asking the team
team = marft_jax.LoadedTeam(config.run.dir)
for question in ("3+4=?", "8+9=?"):
    for turn in team.ask(question).turns:
        print(f"{turn.name}: {turn.text!r}")

# %% Reading the run: columns of NumPy arrays (pandas.DataFrame takes them), episodes as records
run = marft_jax.read_run(config.run.dir)
columns = run.columns()
for name in ("reward/mean", "agent/planner/entropy", "agent/solver/entropy"):
    print(f"{name:24s}", columns[name].round(2))
wrong = [row for row in run.episodes(1) if row["reward"] == 0]
print(f"{len(wrong)} wrong in step 1, such as", [row["turns"][-1]["text"] for row in wrong[:3]])
