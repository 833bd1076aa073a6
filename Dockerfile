# docker build -t meshwright .                               for CPUs
# docker build -t meshwright --build-arg DEVICE=cuda .       for NVIDIA GPUs; run it with --gpus all
# --build-arg TORCH_INDEX=URL takes torch from another package index, such as one of builds for CPUs alone
ARG DEVICE=cpu

FROM python:3.12-slim AS base-cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# nvcc is what DeepSpeed and torch.compile look for
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-cuda
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-venv && rm -rf /var/lib/apt/lists/*

FROM base-${DEVICE}
ARG TORCH_INDEX=""
RUN python3 -m venv /opt/meshwright
ENV PATH=/opt/meshwright/bin:$PATH
WORKDIR /opt/source
COPY . .
# torch first: DeepSpeed looks for it while it is built
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt .
WORKDIR /workspace
# ranks of one container share memory: docker run --shm-size is not needed on CPUs, NCCL wants 1g
ENTRYPOINT ["run"]
CMD ["--help"]
