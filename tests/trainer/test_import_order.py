"""Inside the trainer every import points backwards in one declared order."""

from __future__ import annotations

from tests.test_imports import GRAPH

ORDER = (
    *(
        "process_end",
        "ranks",
        "whole_folder",
        "gpu_memory",
        "objective",
        "packing",
        "step_stats",
        "gradient",
        "split_variance",
        "diagnostics",
    ),
    *(
        "lora",
        "model",
        "startup_proof",
        "reference",
        "weights",
        "warmstart",
        "plan",
        "deepspeed_settings",
        "schedules",
        "learner",
        "checkpoint",
    ),
    *("orchestrator_client", "loop", "gpu_report", "__main__"),
)
GRADIENT_ORDER = (
    *(
        "norms",
        "sums",
        "sharded_sums",
        "segment_weights",
        "segments",
        "recorder",
        "head_pieces",
        "tiles",
        "recorded_modules",
        "sequence",
        "divided_recorder",
        "capped_attention",
        "attention",
        "logit_rule",
        "logprobs",
        "scored",
        "passes",
        "step_members",
        "step_gradient",
    ),
    *("handoff", "methods", "plain", "spread_methods", "method_choice"),
)


def backwards(package: str, order: tuple[str, ...]) -> list[str]:
    """Imports inside of `package` that do not point to an earlier part of `order`."""
    parts = {name: name.removeprefix(f"{package}.").split(".")[0] for name in GRAPH if name.startswith(f"{package}.")}
    assert set(parts.values()) == set(order)
    return [
        f"{name} imports {imported}"
        for name, part in parts.items()
        for imported in GRAPH[name]
        if imported in parts and parts[imported] != part and order.index(parts[imported]) > order.index(part)
    ]


def test_every_import_in_the_trainer_points_to_an_earlier_part() -> None:
    assert backwards("trainer", ORDER) == []


def test_every_import_among_the_gradients_modules_points_to_an_earlier_one() -> None:
    assert backwards("trainer.gradient", GRADIENT_ORDER) == []
