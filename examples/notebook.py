"""Cells for a notebook (VS Code and Jupytext open this file as one), where an event loop is running already."""

# %% Check the environment. Interrupting the kernel stops every part, here as everywhere.
import agentrl

report = agentrl.check_env("envs.modmath:ModMath", limit=4)
print(report.ok)

# %% Read a run, also while it trains in a terminal: run this cell again.
run = agentrl.read_run("runs/quickstart")
print(run.status().sentence)
rewards = run.metrics().columns()["rollout/reward_mean"]
print("mean reward of the last steps:", [round(reward, 2) for reward in rewards[-5:]])

# %% The wrong episodes of the last held-out measurement, as a table where pandas is installed.
last = run.steps("eval")[-1]
wrong = [episode for episode in run.episodes("eval", step=last) if episode["reward"] < 1]
print(f"{len(wrong)} wrong episodes of version {last}")
