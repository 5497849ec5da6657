"""A plugin of vLLM that forces AsyncScheduler and a batch queue of 2 on the CPU, where vLLM switches both off.

The worker itself stays synchronous: its asynchronous half copies between devices.
"""

import sys
from typing import Any

MARK = "AsyncScheduler with a batch queue of"


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    check, make_runner, make_scheduler = (
        CpuPlatform.check_and_update_config.__func__,
        CPUModelRunner.__init__,
        AsyncScheduler.__init__,
    )

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def runner(self: Any, *args: Any, **options: Any) -> None:
        make_runner(self, *args, **options)
        self.use_async_scheduling = False

    def scheduler(self: Any, *args: Any, **options: Any) -> None:
        make_scheduler(self, *args, **options)
        sys.stderr.write(f"{MARK} {self.vllm_config.max_concurrent_batches}\n")

    CpuPlatform.check_and_update_config = classmethod(checked)
    CPUModelRunner.__init__ = runner
    AsyncScheduler.__init__ = scheduler
