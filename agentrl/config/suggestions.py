"""Which key somebody means by a name that is none: in another section, from another library, or misspelt.

Independent of files and of what the keys do.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

MAX_SUGGESTIONS = 2
SIMILARITY = 0.6

SYNONYMS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        name: keys
        for keys, names in (
            (("model.path",), "model_name_or_path model_name model_path base_model pretrain actor_model"),
            (("model.dtype",), "torch_dtype precision bf16 fp16"),
            (("model.chat_template_args",), "chat_template_kwargs"),
            (("model.lora",), "use_peft use_lora peft"),
            (("model.lora.rank",), "lora_rank lora_r"),
            (("model.lora.alpha",), "lora_alpha"),
            (("model.lora.target_modules",), "lora_target_modules"),
            (("env.target",), "env_id env_name environment"),
            (("env.kwargs",), "env_args env_kwargs"),
            (("env.train_data",), "dataset dataset_name data_path train_file train_files prompt_data"),
            (("env.eval_data",), "eval_dataset val_file val_files test_file eval_file"),
            (("learner.lr",), "learning_rate actor_learning_rate"),
            (("learner.schedule",), "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style"),
            (("learner.warmup_steps",), "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio warmup"),
            (("learner.grad_clip",), "max_grad_norm max_norm gradient_clip gradient_clipping clip_grad"),
            (("learner.betas",), "adam_beta1 adam_beta2 adam_betas"),
            (("learner.zero_stage",), "deepspeed_stage zero"),
            (("learner.offload_optimizer",), "optimizer_offload adam_offload cpu_offload"),
            (("learner.num_ranks",), "num_gpus n_gpus n_gpus_per_node nproc_per_node num_processes world_size"),
            (("learner.save_every",), "save_steps save_freq save_interval"),
            (("learner.keep_checkpoints",), "save_total_limit max_checkpoints"),
            (("learner.pack_tokens",), "micro_batch_size micro_train_batch_size per_device_train_batch_size"),
            (("learner.pack_tokens",), "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu"),
            (("rollout.groups_per_step", "learner.pack_tokens"), "gradient_accumulation_steps"),
            (("rollout.groups_per_step",), "batch_size train_batch_size rollout_batch_size global_batch_size"),
            (("rollout.group_size",), "num_generations n_samples_per_prompt num_samples samples_per_prompt"),
            (("rollout.max_turn_tokens",), "max_tokens max_new_tokens max_completion_length max_response_length"),
            (("rollout.max_turn_tokens",), "response_length generate_max_len"),
            (("rollout.max_context",), "max_length max_len max_model_len max_seq_len max_seq_length"),
            (("rollout.max_context",), "max_prompt_length prompt_max_len context_length"),
            (("rollout.max_lag",), "max_staleness staleness max_off_policy_steps max_async_level async_level"),
            (("rollout.max_lag",), "async_generation_ratio"),
            (("rollout.oversample",), "over_sampling_batch_size partial_rollout"),
            (("rollout.partial",), "mask_offpolicy_in_partial_rollout"),
            (("engine.gpu_memory_fraction",), "gpu_memory_utilization vllm_gpu_memory_utilization"),
            (("engine.tensor_parallel",), "tensor_parallel_size tensor_model_parallel_size tp"),
            (("engine.replicas",), "num_engines data_parallel_size"),
            (("engine.url",), "base_url vllm_server_base_url server_url"),
            (("algorithm.preset",), "loss_type adv_estimator advantage_estimator algo"),
            (("algorithm.clip_low", "algorithm.clip_high"), "epsilon eps_clip clip_eps clip_ratio clip_range"),
            (("algorithm.clip_low",), "epsilon_low clip_ratio_low"),
            (("algorithm.clip_high",), "epsilon_high clip_ratio_high"),
            (("algorithm.kl_beta",), "beta kl_coef init_kl_coef kl_loss_coef use_kl_loss kl_penalty"),
            (("model.reference",), "ref_model ref_model_path reference_model teacher teacher_model teacher_path"),
            (("algorithm.normalize_by_std",), "scale_rewards norm_adv_by_std_in_grpo"),
            (("train.steps",), "max_steps num_steps total_steps total_training_steps num_iterations"),
            (("train.steps",), "num_epochs epochs num_train_epochs total_epochs num_episodes max_epochs"),
            (("eval.every",), "eval_steps eval_every eval_interval test_freq"),
            (("metrics.sinks",), "report_to logger loggers wandb use_wandb tensorboard"),
            (("name",), "run_name experiment_name project_name"),
            (("out_dir",), "output_dir save_path save_dir default_local_dir"),
        )
        for name in names.split()
    }
)
"""Names of TRL, verl, OpenRLHF, prime-rl and transformers -> our keys that come nearest."""


def suggestions(name: str, paths: Sequence[str], *, near: str = "") -> list[str]:
    """The keys of `paths` that `name` most likely means, best first; at most two.

    Args:
        name: as given, dotted or not, `-` for `_`: `learning_rate`, `train.step`, `max-new-tokens`.
        paths: every key of the config, dotted.
        near: a section whose keys come first.

    Example:
        >>> suggestions("learning_rate", ["learner", "learner.lr"])
        ['learner.lr']
    """
    name = name.strip("-").replace("-", "_")
    section, _, last = name.rpartition(".")
    if name in paths and (not near or name.startswith(f"{near}.") or section):
        return [name]
    found = [path for path in paths if path == name]
    found += [path for path in SYNONYMS.get(last, ()) if path in paths]
    found += sorted((path for path in paths if path.rpartition(".")[2] == last), key=_depth)
    if section or not found:
        found += _similar(last, [path for path in paths if path.rpartition(".")[0] == section])
    if not found:
        found += _similar(last, paths) + difflib.get_close_matches(name, paths, n=1, cutoff=SIMILARITY)
    inside = [path for path in found if near and path.startswith(f"{near}.")]
    return list(dict.fromkeys(inside or found))[:MAX_SUGGESTIONS]


def hint(name: str, paths: Sequence[str], *, near: str = "") -> str:
    """The suggestions as a sentence; empty where there are none.

    Example:
        >>> hint("lernr", ["learner", "learner.lr"])
        'did you mean learner?'
    """
    found = suggestions(name, paths, near=near)
    return f"did you mean {' or '.join(found)}?" if found else ""


def _similar(last: str, paths: Sequence[str]) -> list[str]:
    """The path whose last part is spelt most like `last`."""
    names = [path.rpartition(".")[2] for path in paths]
    close = difflib.get_close_matches(last, names, n=1, cutoff=SIMILARITY)
    return sorted((path for path, name in zip(paths, names, strict=True) if name in close), key=_depth)


def _depth(path: str) -> int:
    return path.count(".")
