# All parts of a run but the sandbox; docker-compose.yml defines the containers.
#   docker build -t agentrl --target cpu .          the CPU builds of torch and vLLM, as requirements/lock.txt has them
#   docker build -t agentrl-gpu --target gpu .      the CUDA builds, as requirements/lock-gpu.txt has them

FROM python:3.11-slim AS cpu
# `mounted` installs nothing: packages of an environment on this machine are mounted over site-packages instead.
ARG PACKAGES=locked
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV DS_BUILD_OPS=0
# vLLM's CPU build loads libnuma. It would also compile a few functions, but the image has no compiler.
ENV TORCHDYNAMO_DISABLE=1
RUN apt-get update -qq && apt-get install -qqy --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY requirements/lock.txt /opt/agentrl/requirements/lock.txt
# As requirements/install.sh does, for the same reasons; torch first, because DeepSpeed's build needs it.
RUN if [ "$PACKAGES" = locked ]; then cd /opt/agentrl/requirements && \
      pip="pip install --no-cache-dir --root-user-action=ignore --no-deps" && \
      $pip $(grep -E '^(pip|setuptools|wheel)==' lock.txt) && \
      $pip --retries 1 --extra-index-url $TORCH_INDEX $(grep -E '^torch==' lock.txt) && \
      $pip --no-build-isolation -r lock.txt; \
    fi
COPY . /opt/agentrl
RUN if [ "$PACKAGES" = locked ]; then \
      pip install --no-deps --no-build-isolation --root-user-action=ignore -e /opt/agentrl; \
    fi && python3 -m compileall -q /opt/agentrl
ENV PYTHONPATH=/opt/agentrl PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=agentrl HF_HOME=/work/models/hub
WORKDIR /work
ENTRYPOINT ["/opt/agentrl/docker/as-owner", "python3", "-m", "agentrl"]

FROM python:3.11-slim AS gpu
ENV DS_BUILD_OPS=0
# Triton compiles its launchers when a run starts; Python.h is in the base image.
RUN apt-get update -qq && apt-get install -qqy --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements/lock-gpu.txt /opt/agentrl/requirements/lock-gpu.txt
# As requirements/install.sh does, for the same reasons. The wheels bring CUDA; the driver is the host's.
RUN cd /opt/agentrl/requirements && pip="pip install --no-cache-dir --root-user-action=ignore --no-deps" && \
    $pip $(grep -E '^(pip|setuptools|wheel)==' lock-gpu.txt) && \
    sed -E 's/^(torch[a-z]*)==/\1===/' lock-gpu.txt >/tmp/lock && $pip --no-build-isolation -r /tmp/lock
COPY . /opt/agentrl
RUN pip install --no-deps --no-build-isolation --root-user-action=ignore -e /opt/agentrl && \
    python3 -m compileall -q /opt/agentrl
ENV PYTHONPATH=/opt/agentrl PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=agentrl HF_HOME=/work/models/hub
# NVIDIA's container toolkit refuses to start the container on a driver that is older than CUDA 13 asks for.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=13.0"
WORKDIR /work
ENTRYPOINT ["/opt/agentrl/docker/as-owner", "python3", "-m", "agentrl"]
