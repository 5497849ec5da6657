"""What newcomers type and write wrong, and what each must say. careless_inputs.py runs them."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl.buffer.journal import Journal
from agentrl.config import load
from agentrl.run_folder import RunFolder
from tests.agentrl.cli.careless_inputs import Around, Careless

MINE = "name: mine\nenv:\n  target: ModMath-v0\nmodel:\n  path: models/mine\n  warmstart: {}\n"
TRAIN = "agentrl train configs/quickstart.yaml"
SHOP = "from agentrl.env import ToolEnv\nclass Shop(ToolEnv):\n    pass\n"
LLAMA = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16\n"


@contextmanager
def taken_port(_: Path) -> Iterator[Mapping[str, str]]:
    """{port}: one on which another program listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield {"port": str(taken.getsockname()[1])}


@contextmanager
def full_disk(_: Path) -> Iterator[Mapping[str, str]]:
    """No byte can be written to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield {}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def running_run(folder: Path) -> Iterator[Mapping[str, str]]:
    """runs/quickstart, which another process trains."""
    run = RunFolder.create(folder / "runs", "quickstart", config=load(folder / "configs/quickstart.yaml"))
    Journal(run.journal).close()
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        yield {}


def says(
    what: str,
    typed: str,
    *words: str,
    files: Mapping[str, str | bytes] | None = None,
    code: int = 2,
    around: Around | None = None,
) -> Careless:
    """A row of the table."""
    return Careless(what=what, typed=typed, says=words, files=files or {}, code=code, around=around)


def yaml(what: str, text: str | bytes, *words: str) -> Careless:
    """A config that is wrong."""
    return says(what, "agentrl train my.yaml", "my.yaml", *words, files={"my.yaml": text})


def rows(what: str, name: str, text: str | bytes, *words: str) -> Careless:
    """A file of rows that is wrong."""
    return says(what, f"agentrl env play AimePython-v0 --data {name}", name, *words, files={name: text})


def shop(what: str, text: str, *words: str, target: str = "shop.py:Shop") -> Careless:
    """A file with an environment that is wrong."""
    return says(what, f"agentrl env play {target}", "shop", *words, files={"shop.py": text})


def model(what: str, files: Mapping[str, str | bytes], *words: str) -> Careless:
    """A model folder that is wrong."""
    inside = {f"m/{name}": text for name, text in files.items()}
    return says(what, "agentrl eval configs/quickstart.yaml --model m", *words, files=inside)


FILES = [
    says("a config that does not exist", "agentrl train my.yaml", "cannot read config my.yaml", "configs/"),
    says("a misspelt config", "agentrl train configs/quikstart.yaml", "did you mean configs/quickstart.yaml?"),
    says("a folder instead of a config", "agentrl train configs", "is a folder", "configs/aime_1gpu.yaml"),
    says("no config", "agentrl train", "agentrl train configs/quickstart.yaml"),
    says("a key, but no config", "agentrl train train.steps=5", "CONFIG train.steps=5"),
    says("a config without a command", "agentrl configs/quickstart.yaml", TRAIN),
    says("a misspelt command", "agentrl trian configs/quickstart.yaml", "train"),
    yaml("an empty config", "", "is empty"),
    yaml("tabs", "name: mine\nenv:\n\ttarget: ModMath-v0\n", "my.yaml:3:", "indent with spaces"),
    yaml("a YAML list", "- name: mine\n- env: x\n", "a list"),
    yaml("a bracket that is not closed", "name: a\nenv: {target: x\nmodel: y\n", "my.yaml:3:", "',' or '}'"),
    yaml("a key given twice", MINE + "env:\n  max_turns: 3\n", "my.yaml:7: env is given twice, first in line 2"),
    yaml("a binary file", bytes(range(256)), "is not a text file"),
    yaml("a value where a section belongs", MINE.replace("\n  target:", ""), "my.yaml:2: env must be a section"),
    yaml("a section that is missing", "name: mine\n", "env is missing", "model is missing"),
]

KEYS = [
    says("an option for a key", f"{TRAIN} --steps 5", "train.steps=5"),
    says("an option for a key", f"{TRAIN} --learner.lr=1e-4", "learner.lr=1e-4"),
    says("an option for a key", "agentrl eval configs/quickstart.yaml --lr 1e-4", "learner.lr=1e-4"),
    says("vLLM's option", "agentrl engine my.yaml --tensor-parallel-size=2", "engine.tensor_parallel=2"),
    says("TRL's option", "agentrl rollout configs/quickstart.yaml --max-new-tokens 64", "rollout.max_turn_tokens=64"),
    says("an option for a key", "agentrl warmstart configs/quickstart.yaml --steps 9", "model.warmstart.steps=9"),
    says("an option that does not exist", f"{TRAIN} --frobnicate", "No such option: --frobnicate"),
    says("a key of TRL", f"{TRAIN} learner.learning_rate=1e-4", "unknown key; did you mean learner.lr?"),
    says("a key of TRL, in no section", f"{TRAIN} num_generations=8", "did you mean rollout.group_size?"),
    says("TRL's name of a key", f"{TRAIN} beta=0.04", "did you mean algorithm.kl_beta?"),
    says("a key without its section", f"{TRAIN} steps=5", "did you mean train.steps"),
    says("a misspelt section", f"{TRAIN} lerner.lr=1", "did you mean learner?"),
    says("key and value apart", f"{TRAIN} train.steps 5", "write train.steps=5"),
    says("blanks around =", f"{TRAIN} train.steps = 5", "write train.steps=5"),
    says("a colon for =", f"{TRAIN} train.steps:5", "write train.steps=5"),
    says("two dots", f"{TRAIN} train..steps=5", "write train.steps=5"),
    says("a word for a number", f"{TRAIN} train.steps=five", "train.steps must be an integer > 0; got 'five'"),
    says("no value", f"{TRAIN} train.steps=", "got no value"),
    says("a negative number", f"{TRAIN} rollout.group_size=-1", "rollout.group_size must be an integer >= 1; got -1"),
    says("a fraction", f"{TRAIN} train.steps=2.5", "train.steps must be an integer > 0; got 2.5"),
    says("a huge number", f"{TRAIN} train.steps=1e99", "train.steps must be an integer > 0; got '1e99'"),
    says("not a number", f"{TRAIN} learner.lr=nan", "learner.lr must be a number > 0"),
    says("infinity", f"{TRAIN} learner.lr=.inf", "learner.lr must be a number > 0; got inf"),
    says("a decimal comma", f"{TRAIN} learner.lr=1,5", "learner.lr must be a number > 0; got '1,5'"),
    says("a misspelt choice", f"{TRAIN} algorithm.preset=grop", "did you mean grpo?"),
    says("a bracket that is not closed", f"{TRAIN} 'env.kwargs={{a: 1'", "env.kwargs", "quote"),
    says("several errors", f"{TRAIN} lerner.lr=1 train.steps=x eval.every=-1", "learner?", "train.steps", "eval.every"),
    says("two sections in conflict", f"{TRAIN} rollout.group_size=1", "rollout.group_size", "algorithm.baseline"),
    says("turns longer than the context", f"{TRAIN} rollout.max_turn_tokens=4096", "rollout.max_context=2048"),
    says(
        "a held-out set without a name", f"{TRAIN} eval.sets=[AIME-2025]", "give each set a name", "{data: AIME-2025}"
    ),
    says("a held-out set that is only data", f"{TRAIN} eval.sets.a=GSM8K", "eval.sets.a must be a section", "data"),
    says("rows that no held-out set plays", f"{TRAIN} env.eval_data=r eval.sets.a.data=s", "eval.sets.NAME.data=r"),
    says("a held-out set's misspelt key", f"{TRAIN} eval.sets.a.num_task=3", "eval.sets.a.num_tasks?"),
    says("a held-out set without rows", f"{TRAIN} eval.sets.a.data=nowhere.jsonl", "nowhere.jsonl"),
    says(
        "a held-out set that is none", "agentrl eval configs/quickstart.yaml --set aime", "eval.sets", "without a name"
    ),
    says("temperature in training", f"{TRAIN} rollout.temperature=0.7", "eval.temperature"),
    says("a key to be explained", "agentrl config --describe learning_rate", "did you mean learner.lr?"),
    says("a count of zero", "agentrl eval configs/quickstart.yaml -n 0", "-n"),
]

FOLDERS = [
    says("a slash in the name", f"{TRAIN} name=a/b", "name", "without slashes"),
    says("a file as out_dir", f"{TRAIN} out_dir=notes", "out_dir", "notes", files={"notes": "x"}),
    says("an out_dir that is not writable", f"{TRAIN} out_dir=/proc/runs", "out_dir", "/proc/runs"),
    says("a full disk", TRAIN, "out_dir", "File too large", around=full_disk),
    says("--resume of nothing", "agentrl train --resume runs/nope", "runs/nope"),
    says("--resume of a folder that is no run", "agentrl train --resume configs", "configs", "config.json"),
    says("--resume of a run that runs", "agentrl train --resume runs/quickstart", "4711", around=running_run),
    says("status of nothing", "agentrl status", "runs/"),
    says("status of a name that is no run", "agentrl status nope", "nope"),
    says("status of a file", "agentrl status configs/quickstart.yaml", "configs/quickstart.yaml"),
    says("report of an empty folder", "agentrl report empty", "empty", files={"empty/x": ""}),
    says("report of nothing", "agentrl report runs/nope", "runs/nope"),
    says("an export of nothing", "agentrl export runs/nope --to jsonl", "runs/nope"),
    says("an export without a format", "agentrl export runs/nope", "--to"),
    says("an export to another format", "agentrl export runs/nope --to csv", "jsonl"),
]

MODELS = [
    says("a model that does not exist", "agentrl eval configs/quickstart.yaml --model ./nope", "'./nope'"),
    says("a model that is not made yet", "agentrl eval configs/quickstart.yaml", "agentrl warmstart CONFIG"),
    says("no hub", "agentrl eval configs/quickstart.yaml --model Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B", "hub"),
    says(
        "an address without http",
        "agentrl eval configs/quickstart.yaml --model localhost:8000",
        "http://localhost:8000",
    ),
    says("a file as model", "agentrl eval configs/quickstart.yaml --model w", "is a file", files={"w": "x"}),
    model("weights without config.json", {"model.safetensors": "x"}, "no config.json"),
    model("a config.json that is cut off", {"config.json": '{"model_type": '}, "config.json is not valid JSON"),
    model("no weights", {"config.json": LLAMA, "tokenizer.json": "{}"}, "no weights"),
    model("no tokenizer", {"config.json": LLAMA, "w.bin": "x"}, "tokenizer.json"),
    model("git-lfs pointers", {"config.json": LLAMA, "tokenizer.json": "", "w.safetensors": POINTER}, "git lfs pull"),
    model("weights that are cut off", {"config.json": LLAMA, "w.safetensors": "\x10" + "\0" * 9}, "is cut off"),
    model(
        "a run's folder as model",
        {"config.json": "{}", "trajectories/x": "", "checkpoints/final/config.json": LLAMA},
        "model.path=m/checkpoints/final",
    ),
    says("no warm start section", "agentrl warmstart configs/aime_1gpu.yaml", "model.warmstart"),
]

DATA = [
    says("no data", "agentrl env play AimePython-v0", "env.eval_data"),
    says("data that does not exist", "agentrl env play AimePython-v0 --data rows.jsonl", "rows.jsonl"),
    rows("an empty file", "rows.jsonl", "", "no rows"),
    rows("a row that is cut off", "rows.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": \n', "rows.jsonl:2"),
    rows("other columns", "rows.jsonl", '{"instruction": "a", "output": "1"}\n', "?problem=KEY"),
    rows("a binary file", "rows.jsonl", bytes(range(256)), "rows.jsonl:1"),
    rows("a CSV file", "rows.csv", "problem,answer\na,1\n", ".jsonl"),
    rows("a JSON list", "rows.json", '[{"problem": "a", "answer": "1"}]', "one object"),
    rows("a broken Parquet file", "rows.parquet", "x", "rows.parquet"),
    says("a folder without rows", "agentrl env play AimePython-v0 --data d", "x.txt", files={"d/x.txt": "x"}),
]

ENVIRONMENTS = [
    says("a file that does not exist", "agentrl env play shop.py:Shop", "there is no file shop.py"),
    says("a misspelt id", "agentrl env play ModMaths-v0", "did you mean 'ModMath-v0'?"),
    says("a path for a module", "agentrl env play envs/modmath:ModMath", "path/to/file.py:Class"),
    shop("no class", SHOP, "shop.py:Shop", target="shop.py"),
    shop("a misspelt class", SHOP, "did you mean 'Shop'?", target="shop.py:Shopp"),
    shop("a class that is no environment", "class Shop:\n    pass\n", "ToolEnv"),
    shop("an abstract class", SHOP, "does not define reset"),
    shop("a syntax error", "class Shop(:\n    pass\n", "invalid syntax (shop.py:1)"),
    shop("an import that is missing", "import torchh\n", "torchh"),
    shop("an error while it is loaded", "x = 1\ny = 1 / 0\n", "shop.py:2", "ZeroDivisionError"),
    shop("a script that exits", "import sys\nsys.exit(0)\n", "SystemExit"),
    says("an argument without a value", "agentrl env play ModMath-v0 --arg a", "NAME=VALUE"),
    says("an argument that does not exist", "agentrl env play ModMath-v0 --arg a=3", "'a'"),
    says("a task that does not exist", "agentrl env play ModMath-v0 --task 99999999", "99999999"),
    says("a wrapper that does not exist", f"{TRAIN} env.wrappers=[TimeLimits]", "TimeLimit"),
    says("a Gymnasium id that is misspelt", "agentrl env play gymnasium:FrozenLak-v1", "FrozenLake"),
    says("env new: a digit first", "agentrl env new 3D", "'3D'", "letter"),
    says("env new: a path", "agentrl env new games/shop.py", "Shop", "--in games"),
    says("env new: a name that hides another", "agentrl env new ToolEnv", "MyToolEnv"),
    says("env new: a file that exists", "agentrl env new Shop", "shop.py exists already", files={"shop.py": "x"}),
    says("env new: a full disk", "agentrl env new Shop", "cannot write shop.py", "File too large", around=full_disk),
]

SERVERS = [
    says("a sandbox port in use", f"{TRAIN} sandbox.port={{port}}", "sandbox.port: cannot listen", around=taken_port),
    says("a port in use", "agentrl sandbox --port {port}", "cannot listen", "--port", around=taken_port),
    says("a port that does not exist", f"{TRAIN} engine.port=99999", "engine.port must be an integer", "<= 65535"),
    says("an engine.url without http", f"{TRAIN} engine.url=localhost:8000", "http://localhost:8000"),
    says("an orchestrator without a token", "agentrl orchestrator configs/quickstart.yaml", "AGENTRL_TOKEN"),
    says("a sandbox for everybody", "agentrl sandbox --host 0.0.0.0", "--token-env"),
    says(
        "a token file that does not exist",
        "AGENTRL_TOKEN_FILE=nope agentrl orchestrator configs/quickstart.yaml",
        "nope",
    ),
    says("a served model, but no URL", "agentrl eval configs/quickstart.yaml --served-model gpt", "--model https://"),
]

RENDER = "agentrl cluster render"
CLUSTERS = [
    says("a cluster system that does not exist", f"{RENDER} slrum configs/quickstart.yaml", "slurm"),
    says("a cluster system, but no config", f"{RENDER} slurm", "CONFIG"),
    says(
        "a config where the cluster system belongs",
        f"{RENDER} configs/quickstart.yaml",
        "agentrl cluster render slurm configs/quickstart.yaml",
    ),
    says("no node", f"{RENDER} slurm configs/quickstart.yaml --nodes 0", "--nodes", "equal to 1"),
    says("an option of another cluster system", f"{RENDER} slurm configs/quickstart.yaml --image a", "--image"),
    says("a hostfile with Ray", f"{RENDER} slurm configs/cluster/aime.yaml", "Set ray.ranks_per_node instead"),
]

CASES = [*FILES, *KEYS, *FOLDERS, *MODELS, *DATA, *ENVIRONMENTS, *SERVERS, *CLUSTERS]
