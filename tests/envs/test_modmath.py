from collections import Counter
from itertools import islice

import pytest

from agentrl.env import load_env_class, make, play_script
from agentrl.types import Task
from envs.modmath import NUM_TEST_TASKS, ModMath
from envs.modmath_templates import BAD_HABITS, TEMPLATES, Template, fill, outputs
from sandbox.client import SandboxClient


def train(seed: int, count: int) -> list[Task]:
    return list(islice(ModMath.tasks("train", seed=seed), count))


def test_is_registered() -> None:
    assert load_env_class("ModMath-v0") is ModMath


def test_test_split_is_finite_distinct_and_the_same_for_every_seed() -> None:
    tasks = list(ModMath.tasks("test"))
    assert len({task.prompt for task in tasks}) == NUM_TEST_TASKS
    assert tasks == list(ModMath.tasks("test", seed=7))


def test_train_is_fixed_by_its_seed() -> None:
    assert train(3, 100) == train(3, 100)
    assert train(3, 100) != train(4, 100)


def test_train_never_shows_a_test_problem() -> None:
    held_out = {task.prompt for task in ModMath.tasks("test")}
    assert not held_out & {task.prompt for seed in range(3) for task in train(seed, 5000)}


def test_any_prefix_is_balanced_over_templates() -> None:
    counts = Counter(task.metadata["template"] for task in train(0, 10 * len(TEMPLATES)))
    assert set(counts.values()) == {10}


def test_answers_are_aime_answers_and_vary() -> None:
    answers = [int(task.answer or "-1") for task in train(0, 1200)]
    assert min(answers) >= 0 and max(answers) <= 999
    assert len(set(answers)) > 300


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_both_right_programs_compute_the_answer(template: Template) -> None:
    for task in train(1, 40 * len(TEMPLATES)):
        if task.metadata["template"] == template.name:
            for program in (template.right, template.right_in_steps):
                assert outputs(fill(program, task.metadata["numbers"]))[-1] == task.answer


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_wrong_programs_are_mostly_wrong(template: Template) -> None:
    tasks = [task for task in train(1, 60 * len(TEMPLATES)) if task.metadata["template"] == template.name]
    for program in template.wrong:
        right = sum(outputs(fill(program, task.metadata["numbers"]))[-1] == task.answer for task in tasks)
        assert right <= 0.2 * len(tasks)


def test_demonstrations_are_fixed_by_task_and_seed() -> None:
    task = train(0, 1)[0]
    assert ModMath.demonstrations(task, skill=0.3, seed=5) == ModMath.demonstrations(task, skill=0.3, seed=5)
    assert len({str(ModMath.demonstrations(task, skill=0.3, seed=seed)) for seed in range(50)}) > 10


def test_every_bad_habit_occurs_on_one_and_the_same_problem() -> None:
    task = train(0, 1)[0]
    scripts = [ModMath.demonstrations(task, skill=0.01, seed=seed) or [] for seed in range(200)]
    habits = {_habit([m.content for m in s], "".join(str(m.tool_calls) for m in s)) for s in scripts}
    assert habits == set(BAD_HABITS)


def _habit(contents: list[str], code: str) -> str:
    if "guess" in contents[-1]:
        return "guess"
    if "Rounded" in contents[-1]:
        return "round"
    return "no_print" if "y = " in code else "wrong_method"


def test_skill_is_the_share_of_right_answers() -> None:
    tasks = train(0, 600)
    finals = [(ModMath.demonstrations(task, skill=0.5) or [])[-1].content for task in tasks]
    right = sum(f"\\boxed{{{task.answer}}}" in final for task, final in zip(tasks, finals, strict=True))
    assert 0.44 < right / len(tasks) < 0.60


def test_rows_from_a_file_have_no_demonstrations() -> None:
    assert ModMath.demonstrations(Task(id="aime-1", prompt="?", answer="7")) is None


async def test_experts_score_one_and_bad_habits_score_zero_in_the_real_sandbox() -> None:
    async with SandboxClient.embedded() as sandbox:
        for task in train(2, 2 * len(TEMPLATES)):
            for seed in range(3):
                script = ModMath.demonstrations(task, skill=1.0, seed=seed) or []
                episode = await play_script(make(ModMath, sandbox=sandbox), task, script)
                assert episode.reward == 1.0
            script = ModMath.demonstrations(task, skill=1e-9, seed=1) or []
            episode = await play_script(make(ModMath, sandbox=sandbox), task, script)
            lucky = f"\\boxed{{{task.answer}}}" in script[-1].content
            assert episode.reward == float(lucky)


async def test_variables_live_on_between_the_two_calls() -> None:
    async with SandboxClient.embedded() as sandbox:
        task = train(0, 1)[0]
        in_steps = (ModMath.demonstrations(task, seed=seed) or [] for seed in range(100))
        script = next(messages for messages in in_steps if len(messages) == 3)
        episode = await play_script(make(ModMath, sandbox=sandbox), task, script)
        assert [m.content for m in episode.messages if m.role == "tool"][-1] == task.answer
