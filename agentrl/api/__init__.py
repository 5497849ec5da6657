"""The Python API, for scripts and notebooks: `agentrl.train`, `evaluate`, `rollout`, `check_env`, `read_run`.

The commands in `agentrl/cli` call these functions. They print nothing unless asked to, and their errors are the
library's exceptions.

May import: everything before it in the order of imports. Start reading in `running.py`.
"""

from agentrl.api.checking import check_env
from agentrl.api.checkpoints import evaluate_checkpoints
from agentrl.api.measuring import evaluate, rollout
from agentrl.api.reading import Run, read_run
from agentrl.api.running import RunResult, train

__all__ = ["Run", "RunResult", "check_env", "evaluate", "evaluate_checkpoints", "read_run", "rollout", "train"]
