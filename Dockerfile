# The command line in a container, on CPUs:
#   docker build --tag linformer-kit .
# For GPUs, name the index of a CUDA build of PyTorch, which pytorch.org lists, and run with --gpus all:
#   docker build --build-arg TORCH_INDEX=… --tag linformer-kit .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

WORKDIR /source
# torch first, in a layer of its own: it is most of the image and changes least
COPY constraints.txt ./
RUN pip install --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# PIP_CONSTRAINT reaches the build environment too, which --constraint does not
RUN PIP_CONSTRAINT=/source/constraints.txt pip install ".[train]"

RUN useradd --create-home --uid 1000 linformer && install --directory --owner linformer /work
USER linformer
WORKDIR /work
ENTRYPOINT ["linformer"]
CMD ["--help"]
