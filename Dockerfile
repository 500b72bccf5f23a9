# The command line on CPUs:
#   docker build --tag linformer-kit .
# For GPUs, set the package index of a CUDA build of PyTorch (see pytorch.org), and run with --gpus all:
#   docker build --build-arg TORCH_INDEX=… --tag linformer-kit .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

WORKDIR /source
# torch in its own layer: it is the largest part of the image and changes rarely
COPY constraints.txt ./
RUN pip install --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# unlike --constraint, PIP_CONSTRAINT also applies to the build environment
RUN PIP_CONSTRAINT=/source/constraints.txt pip install ".[train]"

RUN useradd --create-home --uid 1000 linformer && install --directory --owner linformer /work
USER linformer
WORKDIR /work
ENTRYPOINT ["linformer"]
CMD ["--help"]
