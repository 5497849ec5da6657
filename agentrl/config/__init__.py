"""The settings of a run as one typed, frozen tree: YAML in, resolved JSON out.

May import: `agentrl.types`, `agentrl.errors`, `sandbox.protocol` (the names of its backends). Start reading in
`tree.py` (the sections), then `loading.py`. `reference.py` documents the keys.
"""

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.engine import EngineConfig
from agentrl.config.environment import EnvConfig, WrapperConfig
from agentrl.config.evaluation import EvalConfig, EvalSetConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.loading import ConfigSource, load, parse, save
from agentrl.config.model import LoraConfig, ModelConfig, WarmstartConfig
from agentrl.config.overrides import Overrides
from agentrl.config.problems import InvalidConfig
from agentrl.config.ray import RayConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.section import Section
from agentrl.config.tree import (
    Config,
    MetricsConfig,
    SandboxConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigSource",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalSetConfig",
    "InvalidConfig",
    "LearnerConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "Overrides",
    "RayConfig",
    "RolloutConfig",
    "SandboxConfig",
    "Section",
    "TrainConfig",
    "WarmstartConfig",
    "WrapperConfig",
    "load",
    "parse",
    "save",
]
